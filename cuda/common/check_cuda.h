// Every CUDA runtime call of the library goes through check_cuda().
#pragma once
#include <cuda_runtime_api.h>

#include "error.h"

namespace linattn::cuda {

// Throws Status::Runtime when a call failed, and clears the runtime's thread-local error so that the caller's framework does
// not find it again. An error may stem from earlier asynchronous work of the process.
inline void check_cuda(cudaError_t code, const char *call) {
    if (code == cudaSuccess) return;
    cudaGetLastError();
    fail(Status::Runtime, "%s failed: %s (%s).", call, cudaGetErrorString(code), cudaGetErrorName(code));
}

}  // namespace linattn::cuda
