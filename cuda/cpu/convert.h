// Number formats in memory to and from the float or double that is computed in. Plain integer arithmetic, so that the
// compiler vectorises it for any instruction set; rounding is to nearest even.
#pragma once
#include <cstdint>
#include <cstring>

#include "../ops.h"

#define LINATTN_INLINE inline __attribute__((always_inline))

namespace linattn::cpu {

struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

template <class To, class From>
LINATTN_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

LINATTN_INLINE float widen(float x) { return x; }
LINATTN_INLINE double widen(double x) { return x; }
LINATTN_INLINE float widen(Bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

LINATTN_INLINE float widen(F16 x) {
    const uint32_t sign = (x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
    const uint32_t rebias = 112u << 23;  // 127 - 15
    const uint32_t normal = (magnitude << 13) + rebias;
    const uint32_t special = normal + rebias;                                                                   // inf, nan
    const uint32_t small = bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);  // denormal
    const uint32_t bits = magnitude < 0x400u ? small : magnitude < 0x7c00u ? normal : special;
    return bit_cast<float>(sign | bits);
}

LINATTN_INLINE void narrow(float *to, float x) { *to = x; }
LINATTN_INLINE void narrow(float *to, double x) { *to = static_cast<float>(x); }
LINATTN_INLINE void narrow(double *to, float x) { *to = x; }
LINATTN_INLINE void narrow(double *to, double x) { *to = x; }

template <class Real>
LINATTN_INLINE void narrow(Bf16 *to, Real x) {
    const uint32_t bits = bit_cast<uint32_t>(static_cast<float>(x));
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    to->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

template <class Real>
LINATTN_INLINE void narrow(F16 *to, Real x) {
    const uint32_t bits = bit_cast<uint32_t>(static_cast<float>(x));
    const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    const uint32_t normal =
        (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;  // 65520 and up carry into inf
    // Adding 0.5 leaves multiples of 2^-24, the denormals' step, in the low bits.
    const uint32_t small = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);
    const uint32_t large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t half = magnitude < 0x38800000u ? small : magnitude < 0x47800000u ? normal : large;
    to->bits = static_cast<uint16_t>(sign | half);
}

constexpr int64_t kTile = 16;  // a multiple of every vector's length; inner loops of this fixed length need no remainder
constexpr int64_t kRun = 128;  // elements of a transposed array that are taken in one go, so that memory is read in long runs

#if defined(__clang__)
#define LINATTN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LINATTN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Int4{__VA_ARGS__})
#endif

// to[c][r] = from[r][c] for a tile of kTile x kTile, four by four in registers.
LINATTN_INLINE void transpose_tile(float *to, int64_t to_ld, const float *from, int64_t from_ld) {
    typedef float Float4 __attribute__((vector_size(16)));
    typedef int32_t Int4 __attribute__((vector_size(16), unused));
    for (int64_t r = 0; r < kTile; r += 4)
        for (int64_t c = 0; c < kTile; c += 4) {
            Float4 row[4], col[4];
            for (int i = 0; i < 4; ++i) std::memcpy(&row[i], from + (r + i) * from_ld + c, sizeof(Float4));
            const Float4 low01 = LINATTN_SHUFFLE(row[0], row[1], 0, 4, 1, 5);
            const Float4 low23 = LINATTN_SHUFFLE(row[2], row[3], 0, 4, 1, 5);
            const Float4 high01 = LINATTN_SHUFFLE(row[0], row[1], 2, 6, 3, 7);
            const Float4 high23 = LINATTN_SHUFFLE(row[2], row[3], 2, 6, 3, 7);
            col[0] = LINATTN_SHUFFLE(low01, low23, 0, 1, 4, 5);
            col[1] = LINATTN_SHUFFLE(low01, low23, 2, 3, 6, 7);
            col[2] = LINATTN_SHUFFLE(high01, high23, 0, 1, 4, 5);
            col[3] = LINATTN_SHUFFLE(high01, high23, 2, 3, 6, 7);
            for (int i = 0; i < 4; ++i) std::memcpy(to + (c + i) * to_ld + r, &col[i], sizeof(Float4));
        }
}
LINATTN_INLINE void transpose_tile(double *to, int64_t to_ld, const double *from, int64_t from_ld) {
    for (int64_t r = 0; r < kTile; ++r)
        for (int64_t c = 0; c < kTile; ++c) to[c * to_ld + r] = from[r * from_ld + c];
}

// dst[r][c] = src[r * row_stride + c * col_stride]
template <class Real, class Stored>
LINATTN_INLINE void load_as(Real *dst, int64_t ld, const Stored *src, int64_t row_stride, int64_t col_stride, int64_t rows,
                            int64_t cols) {
    if (col_stride == 1) {
        for (int64_t r = 0; r < rows; ++r) {
            const Stored *from = src + r * row_stride;
            Real *__restrict to = dst + r * ld;
            int64_t c = 0;
            for (; c + kTile <= cols; c += kTile)
                for (int64_t i = 0; i < kTile; ++i) to[c + i] = static_cast<Real>(widen(from[c + i]));
            for (; c < cols; ++c) to[c] = static_cast<Real>(widen(from[c]));
        }
        return;
    }
    Real tile[kTile * kRun];
    for (int64_t r = 0; r < rows; r += kRun)
        for (int64_t c = 0; c < cols; c += kTile) {
            const Stored *from = src + r * row_stride + c * col_stride;
            Real *to = dst + r * ld + c;
            const int64_t height = rows - r < kRun ? rows - r : kRun, width = cols - c < kTile ? cols - c : kTile;
            const int64_t tiled = row_stride == 1 && width == kTile ? height / kTile * kTile : 0;
            for (int64_t j = 0; j < kTile; ++j)
                for (int64_t i = 0; i < tiled; ++i) tile[j * kRun + i] = static_cast<Real>(widen(from[j * col_stride + i]));
            for (int64_t i = 0; i < tiled; i += kTile) transpose_tile(to + i * ld, ld, tile + i, kRun);
            for (int64_t j = 0; j < width; ++j)
                for (int64_t i = tiled; i < height; ++i)
                    to[i * ld + j] = static_cast<Real>(widen(from[i * row_stride + j * col_stride]));
        }
}

// dst[r * row_stride + c * col_stride] = src[r][c]
template <class Real, class Stored>
LINATTN_INLINE void store_as(Stored *dst, int64_t row_stride, int64_t col_stride, const Real *src, int64_t ld, int64_t rows,
                             int64_t cols) {
    if (col_stride == 1) {
        for (int64_t r = 0; r < rows; ++r) {
            const Real *from = src + r * ld;
            Stored *__restrict to = dst + r * row_stride;
            int64_t c = 0;
            for (; c + kTile <= cols; c += kTile)
                for (int64_t i = 0; i < kTile; ++i) narrow(to + c + i, from[c + i]);
            for (; c < cols; ++c) narrow(to + c, from[c]);
        }
        return;
    }
    Real tile[kTile * kRun];
    for (int64_t r = 0; r < rows; r += kRun)
        for (int64_t c = 0; c < cols; c += kTile) {
            const Real *from = src + r * ld + c;
            Stored *to = dst + r * row_stride + c * col_stride;
            const int64_t height = rows - r < kRun ? rows - r : kRun, width = cols - c < kTile ? cols - c : kTile;
            const int64_t tiled = row_stride == 1 && width == kTile ? height / kTile * kTile : 0;
            for (int64_t i = 0; i < tiled; i += kTile) transpose_tile(tile + i, kRun, from + i * ld, ld);
            for (int64_t j = 0; j < kTile; ++j)
                for (int64_t i = 0; i < tiled; ++i) narrow(to + j * col_stride + i, tile[j * kRun + i]);
            for (int64_t j = 0; j < width; ++j)
                for (int64_t i = tiled; i < height; ++i) narrow(to + i * row_stride + j * col_stride, from[i * ld + j]);
        }
}

template <class Real>
LINATTN_INLINE void load_rows(Real *dst, int64_t ld, const char *src, DType dtype, int64_t row_stride, int64_t col_stride,
                              int64_t rows, int64_t cols) {
    switch (dtype) {
        case DType::F32: return load_as(dst, ld, reinterpret_cast<const float *>(src), row_stride, col_stride, rows, cols);
        case DType::F64: return load_as(dst, ld, reinterpret_cast<const double *>(src), row_stride, col_stride, rows, cols);
        case DType::BF16: return load_as(dst, ld, reinterpret_cast<const Bf16 *>(src), row_stride, col_stride, rows, cols);
        case DType::F16: return load_as(dst, ld, reinterpret_cast<const F16 *>(src), row_stride, col_stride, rows, cols);
        default: return;
    }
}

template <class Real>
LINATTN_INLINE void store_rows(char *dst, DType dtype, int64_t row_stride, int64_t col_stride, const Real *src, int64_t ld,
                               int64_t rows, int64_t cols) {
    switch (dtype) {
        case DType::F32: return store_as(reinterpret_cast<float *>(dst), row_stride, col_stride, src, ld, rows, cols);
        case DType::F64: return store_as(reinterpret_cast<double *>(dst), row_stride, col_stride, src, ld, rows, cols);
        case DType::BF16: return store_as(reinterpret_cast<Bf16 *>(dst), row_stride, col_stride, src, ld, rows, cols);
        case DType::F16: return store_as(reinterpret_cast<F16 *>(dst), row_stride, col_stride, src, ld, rows, cols);
        default: return;
    }
}

}  // namespace linattn::cpu
