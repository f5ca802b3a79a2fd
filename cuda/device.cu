// The devices, and what `checked` needs to read back from them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstring>

#include "common/device_guard.h"
#include "common/launch.h"
#include "device.h"
#include "error.h"
#include "ops.h"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "compile with -gencode arch=compute_90a,code=sm_90a (-arch=sm_90a also compiles for plain sm_90)"
#endif

namespace linattn::cuda {

__global__ void device_answer_kernel(int *answer) { *answer = 42; }

// Is some element of g above 0 or NaN, in tokens first .. end of row b? Sets *found; any strides.
__global__ void device_positive_g_kernel(const __grid_constant__ DeltaParams p, int64_t b, int64_t first, int64_t end,
                                         int64_t channels, int *found) {
    int64_t total = (end - first) * p.HV * channels;
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total; i += int64_t{gridDim.x} * blockDim.x) {
        int64_t c = i % channels, h = i / channels % p.HV, t = first + i / channels / p.HV;
        int64_t at = b * p.g.stride[0] + t * p.g.stride[1] + h * p.g.stride[2] + (channels > 1 ? c * p.g.stride[3] : 0);
        float x;
        if (p.g.dtype == DType::F32)
            x = reinterpret_cast<const float *>(p.g.data)[at];
        else if (p.g.dtype == DType::BF16)
            x = __bfloat162float(reinterpret_cast<const __nv_bfloat16 *>(p.g.data)[at]);
        else
            x = __half2float(reinterpret_cast<const __half *>(p.g.data)[at]);
        if (!(x <= 0.0f)) *found = 1;
    }
}

int device_count() {
    int count = 0, driver = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaSuccess) return count;
    cudaGetLastError();  // not left for the next caller
    if (status == cudaErrorInsufficientDriver || cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
        fail(Status::Runtime,
             driver ? "the NVIDIA driver supports CUDA %d.%d, but this library needs 13.0 (driver 580 or newer)"
                    : "there is no NVIDIA driver here; GPUs need CUDA %d.%d (driver 580 or newer)",
             driver ? driver / 1000 : 13, driver ? driver % 1000 / 10 : 0);
    if (status == cudaErrorNoDevice) return 0;
    fail(Status::Runtime, "cudaGetDeviceCount: %s", cudaGetErrorString(status));
}

static int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
}

static int compute_capability(int device) {
    return 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) + attribute(cudaDevAttrComputeCapabilityMinor, device);
}

int multiprocessors(int device) { return attribute(cudaDevAttrMultiProcessorCount, device); }

static bool trivial_kernel_runs(int device) {
    if (compute_capability(device) != 90) return false;
    DeviceGuard guard(device);
    int *answer = nullptr, host = 0;
    if (cudaMalloc(&answer, sizeof host) != cudaSuccess) return cudaGetLastError(), false;
    device_answer_kernel<<<1, 1>>>(answer);
    bool ran = cudaGetLastError() == cudaSuccess &&
               cudaMemcpy(&host, answer, sizeof host, cudaMemcpyDeviceToHost) == cudaSuccess && host == 42;
    cudaFree(answer);
    cudaGetLastError();
    return ran;
}

DeviceInfo device_query(int device) {
    int count = device_count();
    if (device < 0 || device >= count) fail(Status::Value, "device_query: device %d; there are %d CUDA devices", device, count);
    cudaDeviceProp prop;
    check_cuda(cudaGetDeviceProperties(&prop, device), "cudaGetDeviceProperties");
    DeviceInfo info = {};
    std::strncpy(info.name, prop.name, sizeof info.name - 1);
    info.memory_bytes = static_cast<int64_t>(prop.totalGlobalMem);
    info.compute_capability = compute_capability(device);
    info.multiprocessors = prop.multiProcessorCount;
    check_cuda(cudaDriverGetVersion(&info.driver_version), "cudaDriverGetVersion");
    check_cuda(cudaRuntimeGetVersion(&info.runtime_version), "cudaRuntimeGetVersion");
    info.usable = trivial_kernel_runs(device);
    return info;
}

void require_hopper(const char *op, int device) {
    int cc = 0;
    if (cudaDeviceGetAttribute(&cc, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
        cudaGetLastError();
        int count = device_count();
        fail(Status::Runtime, "%s: CUDA device %d does not exist; there are %d", op, device, count);
    }
    if (cc != 9)
        fail(Status::Unsupported, "%s: CUDA device %d has compute capability %d.%d; the kernels are for Hopper (9.0) only", op,
             device, cc, attribute(cudaDevAttrComputeCapabilityMinor, device));
}

void copy_to_host(void *to, const void *from, int64_t bytes, int device, void *stream) {
    DeviceGuard guard(device);
    auto s = static_cast<cudaStream_t>(stream);
    check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, s), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(s), "cudaStreamSynchronize");
}

bool any_positive_g(const DeltaParams &p, int64_t b, int64_t first, int64_t end) {
    if (first >= end) return false;
    DeviceGuard guard(p.device);
    auto s = static_cast<cudaStream_t>(p.stream);
    int *found = nullptr, host = 0;
    check_cuda(cudaMallocAsync(&found, sizeof host, s), "cudaMallocAsync");
    check_cuda(cudaMemsetAsync(found, 0, sizeof host, s), "cudaMemsetAsync");
    LaunchConfig config;
    config.grid.x = 1024;
    config.block.x = 256;
    config.stream = s;
    launch("device_positive_g_kernel", device_positive_g_kernel, config, p, b, first, end,
           p.family == Family::Kda ? p.K : int64_t{1}, found);
    check_cuda(cudaMemcpyAsync(&host, found, sizeof host, cudaMemcpyDeviceToHost, s), "cudaMemcpyAsync");
    check_cuda(cudaFreeAsync(found, s), "cudaFreeAsync");
    check_cuda(cudaStreamSynchronize(s), "cudaStreamSynchronize");
    return host != 0;
}

}  // namespace linattn::cuda
