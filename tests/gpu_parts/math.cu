// The approximate functions and packed conversions, element by element.
#include "parts.cuh"
#include "ptx/math.cuh"

namespace parts {

using namespace linattn::ptx;

enum Function { kEx2, kLg2, kRcp, kRsqrt, kTanh, kTf32 };
enum Packed { kBf16x2, kF16x2, kMulBf16x2, kMulF16x2 };

__global__ void function_kernel(Function f, const float *x, float *y, int64_t n) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
        switch (f) {
            case kEx2: y[i] = ex2_approx_ftz(x[i]); break;
            case kLg2: y[i] = lg2_approx_ftz(x[i]); break;
            case kRcp: y[i] = rcp_approx_ftz(x[i]); break;
            case kRsqrt: y[i] = rsqrt_approx_ftz(x[i]); break;
            case kTanh: y[i] = tanh_approx(x[i]); break;
            case kTf32: y[i] = __uint_as_float(cvt_rna_tf32(x[i])); break;
        }
    }
}

// Conversions read two floats per element, products two packed words.
__global__ void packed_kernel(Packed f, const uint32_t *a, const uint32_t *b, uint32_t *y, int64_t n) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
        switch (f) {
            case kBf16x2: y[i] = cvt_rn_x2<__nv_bfloat16>(__uint_as_float(a[i]), __uint_as_float(b[i])); break;
            case kF16x2: y[i] = cvt_rn_x2<__half>(__uint_as_float(a[i]), __uint_as_float(b[i])); break;
            case kMulBf16x2: y[i] = mul_rn_bf16x2(a[i], b[i]); break;
            case kMulF16x2: y[i] = mul_rn_f16x2(a[i], b[i]); break;
        }
    }
}

linattn::cuda::LaunchConfig wide() {
    linattn::cuda::LaunchConfig config;
    config.grid = {128};
    config.block = {256};
    return config;
}

}  // namespace parts

PARTS_API int parts_function(int f, const float *x, float *y, int64_t n) {
    return parts::guarded([&] {
        linattn::cuda::launch("function_kernel", parts::function_kernel, parts::wide(), static_cast<parts::Function>(f), x, y,
                              n);
    });
}

PARTS_API int parts_packed(int f, const uint32_t *a, const uint32_t *b, uint32_t *y, int64_t n) {
    return parts::guarded([&] {
        linattn::cuda::launch("packed_kernel", parts::packed_kernel, parts::wide(), static_cast<parts::Packed>(f), a, b, y, n);
    });
}
