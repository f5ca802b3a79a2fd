// Memory, errors and the host-side shared pieces (launch checks, tensor maps, device guard) for test_*.py.
#include <chrono>

#include "common/device_guard.h"
#include "common/tensor_map.h"
#include "parts.cuh"

namespace parts {

std::string &error_text() {
    static thread_local std::string text;
    return text;
}

__global__ void fill_kernel(int *out, int value) {
    if (threadIdx.x == 0) out[blockIdx.x] = value;
}

}  // namespace parts

using namespace linattn;
using linattn::cuda::check_cuda;
using parts::guarded;

PARTS_API const char *parts_error() { return parts::error_text().c_str(); }

PARTS_API int parts_device_count(int *count) {
    return guarded([&] { check_cuda(cudaGetDeviceCount(count), "cudaGetDeviceCount"); });
}

PARTS_API int parts_malloc(void **pointer, size_t bytes) {
    return guarded([&] { check_cuda(cudaMalloc(pointer, bytes), "cudaMalloc"); });
}

PARTS_API int parts_free(void *pointer) {
    return guarded([&] { check_cuda(cudaFree(pointer), "cudaFree"); });
}

PARTS_API int parts_copy(void *destination, const void *source, size_t bytes) {
    return guarded([&] { check_cuda(cudaMemcpy(destination, source, bytes, cudaMemcpyDefault), "cudaMemcpy"); });
}

// launch() with any shape; each block writes value.
PARTS_API int parts_launch(int *out, int value, const int64_t *grid, const int64_t *block, const int64_t *cluster,
                           int64_t smem_bytes) {
    return guarded([&] {
        cuda::LaunchConfig config;
        config.grid = {grid[0], grid[1], grid[2]};
        config.block = {block[0], block[1], block[2]};
        config.cluster = {cluster[0], cluster[1], cluster[2]};
        config.smem_bytes = smem_bytes;
        cuda::launch("fill_kernel", parts::fill_kernel, config, out, value);
    });
}

// Microseconds of one launch() with and without a raised shared-memory limit, over `repeats` launches.
PARTS_API int parts_launch_cost(int *out, int repeats, double *plain_us, double *raised_us) {
    return guarded([&] {
        for (int raised = 0; raised < 2; raised++) {
            cuda::LaunchConfig config;
            config.block = {32};
            config.smem_bytes = raised ? 64 * 1024 : 0;
            cuda::launch("fill_kernel", parts::fill_kernel, config, out, 1);
            check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
            const auto begin = std::chrono::steady_clock::now();
            for (int i = 0; i < repeats; i++) cuda::launch("fill_kernel", parts::fill_kernel, config, out, 1);
            const auto end = std::chrono::steady_clock::now();
            check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
            (raised ? *raised_us : *plain_us) = std::chrono::duration<double, std::micro>(end - begin).count() / repeats;
        }
    });
}

// make_tensor_map() on a 2-axis array, only to see what it says.
PARTS_API int parts_tensor_map(const void *data, int dtype, const int64_t *sizes, const int64_t *strides, const int64_t *boxes,
                               int swizzle_bytes) {
    return guarded([&] {
        cuda::make_tensor_map("x", data, static_cast<DType>(dtype),
                              {{sizes[0], strides[0], boxes[0]}, {sizes[1], strides[1], boxes[1]}}, swizzle_bytes);
    });
}

// The current device before, inside and after a guard for `device`.
PARTS_API int parts_device_guard(int device, int *before, int *inside, int *after) {
    const int status = guarded([&] {
        check_cuda(cudaGetDevice(before), "cudaGetDevice");
        cuda::DeviceGuard guard(device);
        check_cuda(cudaGetDevice(inside), "cudaGetDevice");
    });
    return cudaGetDevice(after) == cudaSuccess ? status : static_cast<int>(Status::Runtime);
}
