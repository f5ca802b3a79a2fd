// How the recurrent kernels hold a state: one warp owns all of K and 16 columns of V, in registers.
//
// Lane (lk, lv) = (lane & 7, lane >> 3) holds rows k = 32 j + 4 lk + i (j < D/32, i < 4) of columns v = 4 lv + r (r < 4). Both
// stride orders then move 8 or 16 bytes a lane: four rows i of one column (V-first) or four columns r of one row (K-first), and
// the sums over K run in the same order, so the order of the strides does not change a bit of the result.
// In shared memory a vector over K lies as it is: lanes 0..7 then read 128 bytes side by side, without bank conflicts.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ops.h"

namespace linattn::cuda {

constexpr int kTileV = 16;  // columns of V that a warp owns

__device__ __forceinline__ float bf16_bits(uint32_t bits) { return __uint_as_float(bits << 16); }

// One value of any floating dtype of the GPU ops (f32, bf16, f16): as it lies, and what it means. Apart, because what follows a
// load waits for it, and the next load behind that.
template <class AnyTensor>
__device__ __forceinline__ uint32_t load_bits(const AnyTensor &t, int64_t at) {
    return t.dtype == DType::F32 ? reinterpret_cast<const uint32_t *>(t.data)[at]
                                 : reinterpret_cast<const uint16_t *>(t.data)[at];
}

template <class AnyTensor>
__device__ __forceinline__ float float_of(const AnyTensor &t, uint32_t bits) {
    if (t.dtype == DType::F32) return __uint_as_float(bits);
    return t.dtype == DType::BF16 ? bf16_bits(bits) : __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
}

// The same for i32 and i64.
__device__ __forceinline__ uint64_t load_int_bits(const Tensor &t, int64_t at) {
    return t.dtype == DType::I32 ? reinterpret_cast<const uint32_t *>(t.data)[at]
                                 : reinterpret_cast<const uint64_t *>(t.data)[at];
}

__device__ __forceinline__ int64_t int_of(const Tensor &t, uint64_t bits) {
    return t.dtype == DType::I32 ? static_cast<int32_t>(bits) : static_cast<int64_t>(bits);
}

__device__ __forceinline__ int64_t load_int(const Tensor &t, int64_t at) { return int_of(t, load_int_bits(t, at)); }

// Row of a pool for sequence n; -1 where there is nothing to read or write.
__device__ __forceinline__ int64_t pool_row(const Tensor &table, int64_t n, int64_t rows) {
    int64_t row = table ? load_int(table, n * table.stride[0]) : n;
    return row >= 0 && row < rows ? row : -1;
}

// Eight 2-byte values, as loaded, to float.
__device__ __forceinline__ void unpack8(const uint4 &raw, bool bf16, float (&x)[8]) {
    const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (bf16) {
            x[2 * i] = bf16_bits(word[i] & 0xffffu);
            x[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
        } else {
            float2 pair = __half22float2(*reinterpret_cast<const __half2 *>(&word[i]));
            x[2 * i] = pair.x;
            x[2 * i + 1] = pair.y;
        }
    }
}

template <int D>
struct StateTile {
    static constexpr int kRows = D / 8;  // rows of K that a lane holds
    float s[kRows][4];

    __device__ __forceinline__ void zero() {
#pragma unroll
        for (int kk = 0; kk < kRows; ++kk)
#pragma unroll
            for (int r = 0; r < 4; ++r) s[kk][r] = 0.0f;
    }

    // f(offset in elements, kk, r, transposed): four values at s[kk][r ..] or, transposed, at s[kk ..][r].
    template <class F>
    static __device__ __forceinline__ void for_each_vector(const Tensor &t, int64_t at, int v0, F f) {
        int lane = threadIdx.x & 31, lk = lane & 7, v = v0 + 4 * (lane >> 3);
        if (t.stride[3] == 1) {  // K-first: four columns of one row
            at += v + 4 * lk * t.stride[2];
#pragma unroll
            for (int kk = 0; kk < kRows; ++kk) {
                f(at, kk, 0, false);
                at += (kk & 3) == 3 ? 29 * t.stride[2] : t.stride[2];
            }
        } else {  // V-first: four rows of one column
            at += 4 * lk + v * t.stride[3];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
#pragma unroll
                for (int j = 0; j < kRows / 4; ++j) f(at + 32 * j, 4 * j, r, true);
                at += t.stride[3];
            }
        }
    }

    __device__ __forceinline__ void load(const Tensor &t, int64_t row, int64_t head, int v0) {
        int64_t base = row * t.stride[0] + head * t.stride[1];
        auto put = [&](int kk, int r, bool transposed, float a, float b, float c, float d) {
            if (transposed) {
                s[kk][r] = a, s[kk + 1][r] = b, s[kk + 2][r] = c, s[kk + 3][r] = d;
            } else {
                s[kk][0] = a, s[kk][1] = b, s[kk][2] = c, s[kk][3] = d;
            }
        };
        if (t.dtype == DType::F32) {
            auto *p = reinterpret_cast<const float *>(t.data);
            for_each_vector(t, base, v0, [&](int64_t at, int kk, int r, bool transposed) {
                float4 x = *reinterpret_cast<const float4 *>(p + at);
                put(kk, r, transposed, x.x, x.y, x.z, x.w);
            });
        } else {
            auto *p = reinterpret_cast<const __nv_bfloat16 *>(t.data);
            for_each_vector(t, base, v0, [&](int64_t at, int kk, int r, bool transposed) {
                uint2 x = *reinterpret_cast<const uint2 *>(p + at);
                put(kk, r, transposed, bf16_bits(x.x & 0xffffu), __uint_as_float(x.x & 0xffff0000u), bf16_bits(x.y & 0xffffu),
                    __uint_as_float(x.y & 0xffff0000u));
            });
        }
    }

    __device__ __forceinline__ void store(const Tensor &t, int64_t row, int64_t head, int v0) const {
        int64_t base = row * t.stride[0] + head * t.stride[1];
        auto get = [&](int kk, int r, bool transposed) {
            return transposed ? make_float4(s[kk][r], s[kk + 1][r], s[kk + 2][r], s[kk + 3][r])
                              : make_float4(s[kk][0], s[kk][1], s[kk][2], s[kk][3]);
        };
        if (t.dtype == DType::F32) {
            auto *p = reinterpret_cast<float *>(t.data);
            for_each_vector(t, base, v0, [&](int64_t at, int kk, int r, bool transposed) {
                *reinterpret_cast<float4 *>(p + at) = get(kk, r, transposed);
            });
        } else {
            auto *p = reinterpret_cast<__nv_bfloat16 *>(t.data);
            for_each_vector(t, base, v0, [&](int64_t at, int kk, int r, bool transposed) {
                float4 x = get(kk, r, transposed);
                __nv_bfloat162 lo = __floats2bfloat162_rn(x.x, x.y), hi = __floats2bfloat162_rn(x.z, x.w);
                *reinterpret_cast<uint2 *>(p + at) =
                    make_uint2(*reinterpret_cast<uint32_t *>(&lo), *reinterpret_cast<uint32_t *>(&hi));
            });
        }
    }

    // S = gamma S and S = S + k u^T, four rows at a time; the roundings are pinned, so that a replay gives a step's bits.
    __device__ __forceinline__ void decay4(int kk, const float4 &gamma) {
        const float factor[4] = {gamma.x, gamma.y, gamma.z, gamma.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) s[kk + i][r] = __fmul_rn(s[kk + i][r], factor[i]);
    }
    __device__ __forceinline__ void update4(int kk, const float4 &k, const float (&u)[4]) {
        const float factor[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) s[kk + i][r] = __fmaf_rn(factor[i], u[r], s[kk + i][r]);
    }
};

// Rows kk .. kk + 3 of lane lk, of a vector over K in shared memory; kk is a multiple of 4.
__device__ __forceinline__ float4 share4(const float *s_vector, int lk, int kk) {
    return *reinterpret_cast<const float4 *>(s_vector + 8 * kk + 4 * lk);
}

// Sums over lanes lk, down to kLast classes that are left apart: an exchange halves what a lane carries, until one is left. Lanes
// whose lk differ by one are kApart from one another.
template <int kCarried, int kMask, int kLast = 1, int kApart = 1, int kSums>
__device__ __forceinline__ void sum_over_lanes(float (&sum)[kSums], int lk) {
    if constexpr (kMask >= kLast) {
        constexpr int kNext = kCarried > 1 ? kCarried / 2 : 1;
        bool upper = lk & kMask;
#pragma unroll
        for (int i = 0; i < kNext; ++i) {
            float other = kCarried > 1 ? sum[i + kCarried / 2] : sum[i];
            float sent = upper ? sum[i] : other, kept = upper ? other : sum[i];
            sum[i] = kept + __shfl_xor_sync(0xffffffffu, sent, kApart * kMask);
        }
        sum_over_lanes<kNext, kMask / 2, kLast, kApart>(sum, lk);
    }
}
// Over the classes that a warp holds: numbers 0 .. kCols - 1 are S^T k of a lane's columns, the others S^T q.
template <class C>
__device__ __forceinline__ void sum_in_warp(float (&sum)[2 * C::kCols], int lk) {
    sum_over_lanes<2 * C::kCols, 4, C::kFinal, C::kVFirst ? 1 : 4>(sum, lk);
}

// kCols values side by side.
template <int kCols>
struct alignas(4 * kCols) Columns {
    float x[kCols];
};
template <int kCols>
__device__ __forceinline__ Columns<kCols> load_columns(const float *from) {
    return *reinterpret_cast<const Columns<kCols> *>(from);
}

// The warps' sums of a lane's columns, in the order of the exchanges.
template <int kCols, int kWarps, int kWidth>
__device__ __forceinline__ Columns<kCols> sum_over_warps(const float (&part)[kWarps][kWidth], int column) {
    Columns<kCols> p[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) p[w] = load_columns<kCols>(&part[w][column]);
#pragma unroll
    for (int half = kWarps / 2; half > 0; half /= 2)
#pragma unroll
        for (int w = 0; w < half; ++w)
#pragma unroll
            for (int r = 0; r < kCols; ++r) p[w].x[r] += p[w + half].x[r];
    return p[0];
}

}  // namespace linattn::cuda
