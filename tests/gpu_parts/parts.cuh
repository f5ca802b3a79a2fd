// Shared by the parts: the C boundary (a status, a message) and small device helpers. Every entry point returns 0 or the Status
// of an Error whose text parts_error() gives, and synchronises before it returns.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "common/check_cuda.h"
#include "common/launch.h"
#include "common/swizzle.cuh"
#include "error.h"

#define PARTS_API extern "C" __attribute__((visibility("default")))

namespace parts {

using linattn::ptx::Major;
using linattn::ptx::Swizzle;

std::string &error_text();

template <class F>
int guarded(F &&body) {
    try {
        body();
        linattn::cuda::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        return 0;
    } catch (const linattn::Error &error) {
        error_text() = error.text;
        return static_cast<int>(error.status);
    }
}

// Calls body with the swizzle as a compile-time constant. The pragma: body may be a host lambda.
#pragma nv_exec_check_disable
template <class F>
__host__ __device__ __forceinline__ void with_swizzle(Swizzle swizzle, F &&body) {
    switch (swizzle) {
        case Swizzle::None: body(std::integral_constant<Swizzle, Swizzle::None>()); break;
        case Swizzle::B128: body(std::integral_constant<Swizzle, Swizzle::B128>()); break;
        case Swizzle::B64: body(std::integral_constant<Swizzle, Swizzle::B64>()); break;
        case Swizzle::B32: body(std::integral_constant<Swizzle, Swizzle::B32>()); break;
    }
}

// The dynamic shared memory of a kernel from its first multiple of 1024, where the 128-byte swizzle repeats. Launch with 1024
// more.
__device__ __forceinline__ unsigned char *aligned_smem() {
    extern __shared__ unsigned char raw[];
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(raw));
    return raw + (((address + 1023) & ~1023u) - address);
}

}  // namespace parts
