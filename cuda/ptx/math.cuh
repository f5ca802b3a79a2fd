// Approximate functions and packed conversions. Bounds are on finite results in the normal range and are held by
// tests/gpu_parts/test_math.py; .ftz takes and gives signed zeros for subnormals.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace linattn::ptx {

// 9.7.3 ex2.approx.ftz. 2^x, relative error <= 2^-22; -inf gives 0, below -126 gives 0 (no subnormals), from 128 on gives +inf.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 9.7.3 lg2.approx.ftz. log2 x, absolute error <= 2^-22 for x in [1/2, 2], relative error <= 2^-22 outside; 0 and subnormals
// give -inf, negative x gives NaN. Not accurate relative to the result near x = 1.
__device__ __forceinline__ float lg2_approx_ftz(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 9.7.3 rcp.approx.ftz. 1/x, relative error <= 2^-22; +-0 and subnormals give +-inf, |x| > 2^126 gives +-0.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 9.7.3 rsqrt.approx.ftz. 1/sqrt(x), relative error <= 2^-22; 0 gives +inf, negative x gives NaN.
__device__ __forceinline__ float rsqrt_approx_ftz(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 9.7.3 tanh.approx. Relative error <= 2^-10: bf16 quality only.
__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 9.7.9 cvt.rn.bf16x2.f32. Two floats to packed bf16, lo in bits 0-15; round to nearest even, relative error <= 2^-9.
__device__ __forceinline__ uint32_t cvt_rn_bf16x2(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
}

// 9.7.9 cvt.rn.f16x2.f32. Two floats to packed fp16, lo in bits 0-15; relative error <= 2^-11, absolute 2^-25 below 2^-14,
// |x| >= 65520 gives inf.
__device__ __forceinline__ uint32_t cvt_rn_f16x2(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
}

// The two conversions under one name, for kernels templated on the input type.
template <class T>
__device__ __forceinline__ uint32_t cvt_rn_x2(float lo, float hi);
template <>
__device__ __forceinline__ uint32_t cvt_rn_x2<__nv_bfloat16>(float lo, float hi) {
    return cvt_rn_bf16x2(lo, hi);
}
template <>
__device__ __forceinline__ uint32_t cvt_rn_x2<__half>(float lo, float hi) {
    return cvt_rn_f16x2(lo, hi);
}

// 9.7.9 cvt.rna.tf32.f32. Nearest tf32, ties away from zero, relative error <= 2^-11; the low 13 bits of the result are zero.
__device__ __forceinline__ uint32_t cvt_rna_tf32(float x) {
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

// 9.7.4 mul.rn.bf16x2. Two bf16 products, each rounded once; subnormals kept.
__device__ __forceinline__ uint32_t mul_rn_bf16x2(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// 9.7.4 mul.rn.f16x2.
__device__ __forceinline__ uint32_t mul_rn_f16x2(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

}  // namespace linattn::ptx
