// launch(): the one way a kernel is started. Checks the shape, raises the dynamic shared-memory limit, sets cluster and
// programmatic dependent launch, and turns any failure into an Error. Never synchronises; may be called while a stream is
// captured.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

namespace linattn::cuda {

// 64 bits so that a count that outgrows the hardware's limits is refused, not truncated.
struct Extent {
    int64_t x = 1, y = 1, z = 1;
};

struct LaunchConfig {
    Extent grid;  // blocks; a grid with a zero extent launches nothing
    Extent block;
    Extent cluster;          // divides grid; at most 8 blocks
    int64_t smem_bytes = 0;  // dynamic; the same in every launch of one kernel (see launch.cpp)
    cudaStream_t stream = nullptr;
    bool programmatic = false;  // may start before its predecessor in the stream ends: the kernel calls griddepcontrol_wait()
};

// `arguments` are the addresses of the kernel's parameters, in order. `name` is for messages.
void launch_kernel(const char *name, const void *kernel, const LaunchConfig &config, void **arguments);

template <class... Params, class... Args>
void launch(const char *name, void (*kernel)(Params...), const LaunchConfig &config, Args &&...args) {
    static_assert(sizeof...(Params) == sizeof...(Args), "one argument per kernel parameter");
    std::tuple<std::decay_t<Params>...> values{std::forward<Args>(args)...};
    std::apply(
        [&](auto &...value) {
            void *pointers[] = {const_cast<void *>(static_cast<const void *>(&value))..., nullptr};
            launch_kernel(name, reinterpret_cast<const void *>(kernel), config, pointers);
        },
        values);
}

}  // namespace linattn::cuda
