// What the kernels of the chunked GDN backward pass to each other, and small things that they share (gdn_bwd.cu tells the whole).
//
// Matrices in global memory lie as wgmma wants them in shared memory: whole tiles, swizzled, copied by one bulk copy. Rows are
// tokens, and columns K or V or tokens; of the states, rows are V and columns K. Rows past a sequence's end are 0.
#pragma once
#include "common/fragments.cuh"
#include "common/pipeline.cuh"
#include "common/swizzle.cuh"
#include "delta_bwd.h"
#include "gdn_bwd_cut.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cta.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tokens.cuh"

namespace linattn::cuda::gdn_bwd {

using delta_bwd::Chunk;

constexpr int kC = kBwdChunk;  // tokens
// Gradients of sequences so short are a few dot products, whose terms must not be rounded: the kernels in float do them. A rule of
// the length alone, so that no bits depend on what a sequence is packed with.
constexpr int kFewTokens = 16;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLeastLog2Decay =
    -128.0f;  // of a token: 2^-128 is 0 in fp32 as ex2 has it, and no difference of infinities arises

template <class Element, int kD>
struct Config {
    using T = Element;
    static constexpr int D = kD, kHalves = D / 64;
    using Rows = SmemTile<kC, D, ptx::Swizzle::B128>;     // tokens x channels
    using Half = SmemTile<kC, 64, ptx::Swizzle::B128>;    // tokens x half of the channels
    using Square = SmemTile<kC, kC, ptx::Swizzle::B128>;  // tokens x tokens
    using State = SmemTile<D, D, ptx::Swizzle::B128>;
    using HalfState = SmemTile<64, D, ptx::Swizzle::B128>;  // 64 columns of V
};

// Of a chunk and value head. G: inclusive sums of the log2 decays; |q|, |k|: 1 without l2norm, where q and k stand for themselves.
struct alignas(16) Factors {
    // The forward scan reads write .. growth, the reverse one beta .. erase.
    float write[kC];  // beta 2^(G_last - G) / |k|
    float fade[kC];   // -2^G / |k|
    float beta[kC];
    float decay, unused[3];  // 2^G_last
    float4 growth;    // log2 of how much the keys may lengthen a state, of a quarter of them each; where cuts are possible
    float left[kC];   // 2^(G_last - G) / |k|
    float query[kC];  // scale 2^G / |q|
    float erase[kC];  // -beta 2^G / |k|
    float log2[kC];
    float pair_q[kC], pair_k[kC];  // scale / |q|, beta / |k|
    float norm_q[kC], norm_k[kC];  // 1 / |q|, 1 / |k|

    // log2 of a bound of the norm of what the chunk does to a state: max(1, |1 - beta |k|^2|) a token, times the decay.
    __device__ __forceinline__ float log2_of_bound() const {
        return log2[kC - 1] + ((growth.x + growth.y) + (growth.z + growth.w));
    }
};
static_assert(sizeof(Factors) % 32 == 0, "half of it is a bulk copy");

struct Call {
    CUtensorMap map_q, map_k, map_v, map_do;  // the caller's arrays, where TMA takes them
    BwdCall exact;                            // arguments, and the workspace of the kernels in float
    // Tiles of each chunk and key head, of those chunks alone that TMA does not load; and of each chunk and value head.
    uint16_t *q, *k;
    uint16_t *solve;   // -X: X = 2^(G_i - G_j) of L (1 + beta L)^-1, L_ij = k_i . k_j below the diagonal
    uint16_t *pairs;   // P
    uint16_t *e, *dr;  // e = v - P^T k; dr = du of delta_bwd.cu
    Factors *factors;
    Cut cut;
    int multiprocessors;
    bool tma;  // it takes all four

    __device__ __forceinline__ const BwdParams &p() const { return exact.p; }
    __device__ __forceinline__ int64_t of_key(int64_t chunk, int64_t head) const { return chunk * exact.p.H + head; }
    __device__ __forceinline__ int64_t of_value(int64_t chunk, int64_t head) const { return chunk * exact.p.HV + head; }
    __device__ __forceinline__ int64_t chunks() const { return exact.w.chunk_start[exact.p.N]; }
    __device__ __forceinline__ bool flagged(int64_t n, int64_t head) const { return exact.w.flags[n * exact.p.HV + head]; }
    __device__ __forceinline__ void flag(int64_t n, int64_t head) const {
        exact.w.flags[n * exact.p.HV + head] = 1, exact.w.flags[exact.p.N * exact.p.HV] = 1;
    }
    __device__ __forceinline__ float *state_at(int place) const { return cut.places + place * (exact.p.K * exact.p.V); }
    // Are a chunk's q, k, v and do loaded by TMA from the caller's arrays? It would take rows past a sequence's end as they are.
    __device__ __forceinline__ bool as_given(const Chunk &c) const { return tma && c.length == kC; }
    // Of S before the chunk, or of D after it, in the first half of the slot of the kernels in float.
    template <class C>
    __device__ __forceinline__ char *state(float *of, int64_t value) const {
        return reinterpret_cast<char *>(of + value * C::D * C::D);
    }
};

// Is the chunk all of a sequence of few tokens? A first chunk that is not full is a whole sequence.
__device__ __forceinline__ bool is_few(const Call &call, const Chunk &c) {
    return c.length <= kFewTokens && c.index == call.exact.w.chunk_start[c.n];
}

template <class Tile>
__device__ __forceinline__ char *tile_of(uint16_t *tiles, int64_t index) {
    return reinterpret_cast<char *>(tiles) + index * Tile::kBytes;
}

// A tile of the caller's array, by one thread.
template <class Tile>
__device__ __forceinline__ void load_given(uint32_t to, const CUtensorMap &map, const Chunk &c, int64_t head,
                                           uint32_t barrier) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; panel++)
        ptx::cp_async_bulk_tensor_4d_load(to + panel * Tile::kPanelStrideBytes, &map, barrier, panel * Tile::kPanelCols,
                                          static_cast<int32_t>(head), static_cast<int32_t>(c.token), static_cast<int32_t>(c.b));
}

// Copies columns column .. of the chunk's rows of a caller's array into a tile, rows past the end 0, by `threads` threads. Lands
// at cp_async_wait_group or an arrival of this thread.
template <class Tile>
__device__ __forceinline__ void load_rows(uint32_t tile, const Tensor &t, const Chunk &c, int64_t head, int column, int thread,
                                          int threads) {
    constexpr int kUnits = Tile::kCols / 8;
    const uint16_t *from = reinterpret_cast<const uint16_t *>(t.data) + delta_bwd::element(t, c.b, c.token, head, column);
#pragma unroll 4
    for (int i = thread; i < kC * kUnits; i += threads) {
        const int row = i / kUnits, unit = i % kUnits * 8;
        const bool inside = row < c.length;
        ptx::cp_async_16_zfill(tile + Tile::offset(row, unit), from + (inside ? row * t.stride[1] + unit : 0), inside ? 16 : 0);
    }
}

// d (+)= A B of two tiles at these low halves of descriptors.
template <class T, ptx::Major kA, class TileA, ptx::Major kB, class TileB, int kSteps, int kCount>
__device__ __forceinline__ void issue_ss(float (&d)[kCount], uint32_t a, uint32_t b, bool accumulate) {
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
        const uint32_t of_a = (kA == ptx::Major::K ? TileA::offset(0, 16 * s) : TileA::offset(16 * s, 0)) >> 4;
        const uint32_t of_b = (kB == ptx::Major::K ? TileB::offset(0, 16 * s) : TileB::offset(16 * s, 0)) >> 4;
        ptx::wgmma_ss<T, kA, kB>(
            d, ptx::wgmma_descriptor(a + of_a, kA == ptx::Major::K ? TileA::k_major_high() : TileA::mn_major_high()),
            ptx::wgmma_descriptor(b + of_b, kB == ptx::Major::K ? TileB::k_major_high() : TileB::mn_major_high()),
            s > 0 || accumulate);
    }
    ptx::wgmma_commit_group();
}

// The largest exponent of the halves packed in a word, as a bit pattern: 0x7c00 is an infinity or NaN of fp16. bf16 has the
// range of the sums it comes from.
template <class T, int kSteps>
__device__ __forceinline__ bool overflows(const uint32_t (&a)[kSteps][4]) {
    if constexpr (ptx::kIsBf16<T>) return false;
    uint32_t largest = 0;
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
        for (int i = 0; i < 4; i++) largest = __vmaxu2(largest, a[s][i] & 0x7fff7fffu);
    return (largest & 0xffffu) >= 0x7c00u || largest >> 16 >= 0x7c00u;
}

// x and y in two terms each.
template <class T>
__device__ __forceinline__ void split(float x, float y, uint32_t &high, uint32_t &low) {
    high = ptx::cvt_rn_x2<T>(x, y);
    const float2 h = unpack(T{}, high);
    low = ptx::cvt_rn_x2<T>(x - h.x, y - h.y);
}

// Sum over the four lanes that have the same rows of a fragment.
__device__ __forceinline__ float sum_quad(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

void launch_prepare(const Call &call);
void launch_cut(const Call &call);
void launch_scan(const Call &call, ScanItem *items);  // null: nothing is cut
void launch_join(const Call &call);
void launch_gradients(const Call &call);
int cut_streams(const BwdParams &p, int multiprocessors);

// f(Config) for the call.
template <class F>
void for_config(const BwdParams &p, F f) {
    if (p.q.dtype == DType::BF16)
        p.K == 128 ? f(Config<__nv_bfloat16, 128>{}) : f(Config<__nv_bfloat16, 64>{});
    else
        p.K == 128 ? f(Config<__half, 128>{}) : f(Config<__half, 64>{});
}

}  // namespace linattn::cuda::gdn_bwd
