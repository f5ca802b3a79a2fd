// What the kernels of the chunked GDN backward pass to each other, and small things that they share (gdn_bwd.cu tells the whole).
//
// Matrices in global memory lie as wgmma wants them in shared memory: whole tiles, swizzled, copied by one bulk copy. Rows are
// tokens, and columns K or V or tokens; of the states, rows are V and columns K. Rows past a sequence's end are 0.
//
// All operands are fp16, whatever the caller's type: 3 bits more than bf16 has in as many bytes. For its range powers of 2 are taken
// out, which loses nothing: of each q and k its length; of all that goes forwards or in reverse a unit (gdn_bwd_units.cuh).
#pragma once
#include "common/fragments.cuh"
#include "common/pipeline.cuh"
#include "common/swizzle.cuh"
#include "delta_bwd.h"
#include "gdn_bwd_cut.cuh"
#include "gdn_bwd_units.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cta.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tokens.cuh"

namespace linattn::cuda::gdn_bwd {

using delta_bwd::Chunk;

using Operand = __half;

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

// Of a chunk and value head. G: inclusive sums of the log2 decays. q and k are operands here, the caller's times power_q or power_k;
// |q|, |k|: what l2norm divides these by, or the power. do is the caller's times `queries`, the largest scale / |q|, which the other
// factors of do are divided by. What a chunk gives to D before it has its first decay as a factor: where that is small, `rise` keeps
// it in the range of fp16, and who uses that D multiplies by `fall`, 1 / rise.
struct alignas(16) ScanFactors {
    // The forward scan reads write .. growth, the reverse one beta .. erase.
    float write[kC];  // beta 2^(G_last - G) / |k|
    float fade[kC];   // -2^G / |k|
    float beta[kC];
    float decay, queries, rise, fall;  // decay: 2^G_last
    float4 growth;    // log2 of how much the keys may lengthen a state, of a quarter of them each; where cuts are possible
    float left[kC];   // 2^(G_last - G) / |k|
    float query[kC];  // rise scale 2^G / |q| / queries
    float erase[kC];  // -rise beta 2^G / |k|
};
struct Factors : ScanFactors {
    float log2[kC];
    float pair_q[kC], pair_k[kC];  // scale / |q| / queries, beta / |k|
    float norm_q[kC], norm_k[kC];  // 1 / |q|, 1 / |k|
    float power_q[kC], power_k[kC];

    // log2 of a bound of the norm of what the chunk does to a state: max(1, |1 - beta |k|^2|) a token, times the decay.
    __device__ __forceinline__ float log2_of_bound() const {
        return log2[kC - 1] + ((growth.x + growth.y) + (growth.z + growth.w));
    }
};
static_assert(sizeof(ScanFactors) % 32 == 0 && sizeof(Factors) % 16 == 0, "half of the one, all of the other are bulk copies");

// What a call does: all of it; with save = "states" the forward its part, and the backward the rest (gdn_bwd_saved.cu).
enum class Part : int { Whole, Forward, Reverse };

struct Call {
    CUtensorMap map_q, map_k, map_v, map_do, map_o;  // the caller's arrays, where TMA takes them
    BwdCall exact;                                   // arguments, and the workspace of the kernels in float
    Largest *largest;                                // [N][H]
    // Tiles of each chunk and key head; and of each chunk and value head.
    uint16_t *q, *k;
    uint16_t *solve;   // -X: X = 2^(G_i - G_j) of L (1 + beta L)^-1, L_ij = k_i . k_j below the diagonal
    uint16_t *pairs;   // P / queries
    uint16_t *e, *dr;  // e = v - P^T k; dr = du of delta_bwd.cu
    Factors *factors;
    char *states;         // tiles of S before each chunk
    int64_t state_bytes;  // from one of them to the next
    Cut cut;
    int multiprocessors;
    Part part;
    bool tma;  // it takes all that there are

    __device__ __forceinline__ const BwdParams &p() const { return exact.p; }
    __device__ __forceinline__ int64_t of_key(int64_t chunk, int64_t head) const { return chunk * exact.p.H + head; }
    __device__ __forceinline__ int64_t of_value(int64_t chunk, int64_t head) const { return chunk * exact.p.HV + head; }
    __device__ __forceinline__ int64_t chunks() const { return exact.w.chunk_start[exact.p.N]; }
    __device__ __forceinline__ bool flagged(int64_t n, int64_t head) const { return exact.w.flags[n * exact.p.HV + head]; }
    __device__ __forceinline__ void flag(int64_t n, int64_t head) const {
        exact.w.flags[n * exact.p.HV + head] = 1, exact.w.flags[exact.p.N * exact.p.HV] = 1;
    }
    __device__ __forceinline__ Largest &largest_of(int64_t n, int64_t key_head) const {
        return largest[n * exact.p.H + key_head];
    }
    // What D after a chunk is still to be multiplied by.
    __device__ __forceinline__ float fall_behind(int64_t n, int64_t chunk, int64_t head) const {
        return chunk + 1 < exact.w.chunk_start[n + 1] ? factors[of_value(chunk + 1, head)].fall : 1.0f;
    }
    __device__ __forceinline__ float *state_at(int place) const { return cut.places + place * (exact.p.K * exact.p.V); }
    // Are a chunk's rows loaded by TMA from the caller's arrays? It would take rows past a sequence's end as they are.
    __device__ __forceinline__ bool as_given(const Chunk &c) const { return tma && c.length == kC; }
    // Tiles of S before the chunk, and of D after it: in the first half of the slots of the kernels in float, but S that is saved.
    __device__ __forceinline__ char *state(int64_t value) const { return states + value * state_bytes; }
    template <class C>
    __device__ __forceinline__ char *grad(int64_t value) const {
        return reinterpret_cast<char *>(exact.w.grads + value * C::D * C::D);
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

// Eight elements of the caller's times a factor.
template <class T>
__device__ __forceinline__ uint4 operands(const uint4 &given, float factor) {
    const auto pair = [&](uint32_t word) {
        const float2 x = unpack(T{}, word);
        return ptx::cvt_rn_x2<Operand>(factor * x.x, factor * x.y);
    };
    return make_uint4(pair(given.x), pair(given.y), pair(given.z), pair(given.w));
}

// A tile of v or do becomes one of operands where it lies, by kConverters threads; the loads of the next ones are under way meanwhile.
constexpr int kConverters = 64;
template <class T, class Tile>
__device__ __forceinline__ void convert_tile(uint32_t tile, float factor, int thread) {
#pragma unroll 4
    for (int at = 16 * thread; at < Tile::kBytes; at += 16 * kConverters)
        ptx::st_shared_v4_u32(tile + at, operands<T>(ptx::ld_shared_v4_u32(tile + at), factor));
    ptx::fence_proxy_async_shared_cta();
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
void launch_units(const Call &call);  // where prepare was the forward's
void launch_cut(const Call &call);
void launch_scan(const Call &call, ScanItem *items);     // null: nothing is cut
void launch_outputs(const Call &call, ScanItem *items);  // that of Part::Forward
void launch_join(const Call &call);
void launch_gradients(const Call &call);
int cut_streams(const BwdParams &p, int directions, int multiprocessors);

// f(Config) for the call.
template <class F>
void for_config(const BwdParams &p, F f) {
    if (p.q.dtype == DType::BF16)
        p.K == 128 ? f(Config<__nv_bfloat16, 128>{}) : f(Config<__nv_bfloat16, 64>{});
    else
        p.K == 128 ? f(Config<__half, 128>{}) : f(Config<__half, 64>{});
}

}  // namespace linattn::cuda::gdn_bwd
