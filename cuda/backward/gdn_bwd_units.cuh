// Powers of 2 that bring what the chunked GDN backward multiplies into the range of fp16. Everything forwards (v, S, e) is linear in v
// and the given S, everything in reverse (do, D, dr) in do and the given D, so one factor for each, of a sequence and key head, goes in
// with what is given and comes out of the gradients.
//
// It follows from the largest magnitude of what is given, of which gdn_bwd_prepare_kernel looks at a sample, a 32nd of v and do. What
// the sample missed may overflow: then the state is not finite at the scan's end, which flags the head. Maxima of bits are atomic: no
// order shows.
#pragma once
#include "common/fragments.cuh"
#include "tokens.cuh"

namespace linattn::cuda::gdn_bwd {

// 1 / x of a power of 2.
__device__ __forceinline__ float inverse_power(float x) { return __uint_as_float((254u << 23) - __float_as_uint(x)); }

// Bits of the largest magnitudes of a sequence and key head: of v, of the given S; of |scale q| do, of the given D. 0: none.
struct alignas(16) Largest {
    uint32_t v, state, d_o, grad;
};

struct Unit {
    float to, from;  // the largest times `to` is 1 to 2; 1 / to
    bool apart;      // what tokens give is so small beside the state that it would lose digits
    __device__ __forceinline__ Unit(uint32_t tokens, uint32_t state) {
        const uint32_t most = max(tokens, state) >> 23, exponent = most == 0 ? 127 : min(max(most, 27u), 227u);
        from = __uint_as_float(exponent << 23), to = inverse_power(from);
        apart = tokens != 0 && state >> 23 > (tokens >> 23) + 14;
    }
};
__device__ __forceinline__ Unit forwards(const Largest &of) { return {of.v, of.state}; }
__device__ __forceinline__ Unit in_reverse(const Largest &of) { return {of.d_o, of.grad}; }

// By a warp. What is not finite makes no unit.
__device__ __forceinline__ void note(uint32_t *to, float largest) {
    if (threadIdx.x % 32 == 0 && largest > 0.0f && largest < __uint_as_float(0x7f800000u))
        atomicMax(to, __float_as_uint(largest));
}

// About the largest magnitude of a chunk's rows, by a warp: of 16 columns of one in four tokens, others from token to
// token; of all where those are 0. Each is a sector of its own, so few are read.
template <class T, int D>
__device__ __forceinline__ float largest_of_rows(const Tensor &t, const delta_bwd::Chunk &c) {
    const uint16_t *from = reinterpret_cast<const uint16_t *>(t.data) + delta_bwd::element(t, c.b, c.token, c.head);
    const int lane = threadIdx.x % 32;
    uint32_t largest = 0;
    const auto look = [&](int token, int column) {
        if (token >= c.length) return;
        const uint4 x = *reinterpret_cast<const uint4 *>(from + token * t.stride[1] + column);
        largest = __vmaxu2(__vmaxu2(largest, x.x & 0x7fff7fffu), x.y & 0x7fff7fffu);
        largest = __vmaxu2(__vmaxu2(largest, x.z & 0x7fff7fffu), x.w & 0x7fff7fffu);
    };
    const auto of_warp = [&] { return __reduce_max_sync(~0u, max(largest & 0xffffu, largest >> 16)); };
    look(4 * (lane / 2) + lane / 2 % 4, lane / 2 % (D / 16) * 16 + lane % 2 * 8);
    uint32_t bits = of_warp();
    if (bits == 0) {
        for (int i = lane; i < kBwdChunk * (D / 8); i += 32) look(i / (D / 8), i % (D / 8) * 8);
        bits = of_warp();
    }
    return unpack(T{}, bits).x;
}

// The same of a given state: of 8 columns of V a row of K, others from row to row. Eight loads are under way at once.
template <int D>
__device__ __forceinline__ float largest_of_state(const Tensor &t, int64_t n, int64_t head) {
    constexpr int kAll = D == 128 ? 7 : 6;  // log2 of columns
    const int64_t first = n * t.stride[0] + head * t.stride[1];
    uint32_t largest = 0;
#pragma unroll 1
    for (int columns = 3; columns <= kAll && largest == 0; columns += kAll - 3) {
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < D << columns; i += 8 * 32) {
            uint32_t bits[8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const int at = i + 32 * j, k = at >> columns;
                bits[j] = load_bits(t, first + k * t.stride[2] + at % D * t.stride[3]);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) largest = max(largest, __float_as_uint(fabsf(float_of(t, bits[j]))));
        }
        largest = __reduce_max_sync(~0u, largest);
    }
    return __uint_as_float(largest);
}

}  // namespace linattn::cuda::gdn_bwd
