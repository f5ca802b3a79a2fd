// What the roles of gdn_fwd_kernel share: the configuration, shared memory, barriers and the work items. See gdn_fwd.cuh.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "common/fragments.cuh"
#include "common/pipeline.cuh"
#include "common/swizzle.cuh"
#include "ops.h"
#include "ptx/cta.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"

namespace linattn::cuda::gdn {

constexpr int kChunk = 64;  // tokens

// What a launch of gdn_fwd_kernel computes of each segment of a sequence.
//   Outputs: o, and the state at the end of the sequence.
//   Transition: the affine map S -> M S + N of the segment, as two items: N starts from zero, M from the identity without v.
//   Either: Outputs of whole sequences, launched with 128 columns a CTA and with 64; their lengths decide which has the work.
enum class Pass { Outputs, Transition, Either };

// Which segments an Outputs launch has. Of a cut sequence the first segment needs nobody's transition and the last one has none:
// First runs beside the Transition pass, which has those between the first and the last; Later, after the join, the rest.
enum class Part { Whole, First, Later };

// Chunks in flight. Tables run further ahead: what they wait for (global memory, gate, AUX, state) is longer than four chunks.
constexpr int kTileStages = 3, kValueStages = 3, kTableStages = 8, kItemStages = 4;

// kVCols: columns of V that a CTA owns, one state warpgroup for each 64 of them. kFromWorkspace: A^, P and factors come from there
// (prepared.cuh), with 1/|q| in them; no AUX.
template <class Element, int kD, int kVCols, bool kL2NormInside, Pass kPassOf, bool kFromWorkspace = false>
struct Config {
    using T = Element;
    static constexpr int D = kD, kColumns = kVCols;
    static constexpr bool kL2Norm = kL2NormInside, kOutputs = kPassOf != Pass::Transition;
    static constexpr bool kEither = kPassOf == Pass::Either, kPrepared = kFromWorkspace;
    static constexpr int kStateGroups = kColumns / 64;
    // Who sums the squares of q: the kernel with two state warpgroups waits for AUX, that with one would for the gate warps.
    static constexpr bool kGatesNormQueries = kL2Norm && kOutputs && kStateGroups == 2;
    static constexpr bool kAuxNormsQueries = kL2Norm && kOutputs && kStateGroups == 1;
    // Do AUX's warps share code? It takes them longer, but fits the instruction cache better. See aux.cuh.
    static constexpr bool kSharedCode = kL2Norm && !kGatesNormQueries;
    // Half as many channels, twice the squares of products of random keys: one term of V' in bf16 is then too few for the state.
    static constexpr bool kBf16 = ptx::kIsBf16<T>;
    static constexpr int kValueTerms = D == 64 && kBf16 ? 2 : 1;
    // With one state warpgroup AUX is what takes longest: two of them take turns.
    static constexpr int kAuxGroups = kPrepared ? 0 : kStateGroups == 1 ? 2 : 1;
    static constexpr int kThreads = 128 * (1 + kStateGroups + kAuxGroups);
    // Stages of A^ and P: more than there are AUX groups, see precise.cuh.
    static constexpr int kProductStages = kPrepared ? kTileStages : kAuxGroups + 1;
    static constexpr int kFactorStages = kPrepared ? kTileStages : kTableStages;
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
    // Registers: the launch gives every thread 65536 / threads on the SM; the roles share that sum out anew.
    static constexpr bool kShareRegisters = kLaunchRegisters < 256;
    static constexpr int kLoadRegisters = kPrepared ? 40 : kStateGroups == 2 ? 24 : 32;
    static constexpr int kStateRegisters = kPrepared ? 232 : kStateGroups == 2 ? 208 : 240;
    static constexpr int kAuxRegisters = kStateGroups == 2 ? 72 : 120;
    static_assert(!kShareRegisters || kLoadRegisters + kStateGroups * kStateRegisters + kAuxGroups * kAuxRegisters <=
                                          kThreads / 128 * kLaunchRegisters);
    static_assert(D == 64 || D == 128, "K = V = 64 or 128");
    static_assert(kColumns == 64 || (kColumns == 128 && D == 128), "V is cut into pieces of 64 or 128 columns");
};

// Row factors of one chunk, in floats from the start of the table. G is the inclusive sum of log2 decays, ref(i) the first
// token of i's block of 16. Column tables are in the order of an accumulator: tokens 2q, 2q+1, 8+2q, 9+2q of a block lie
// together. By the gate warps, but for kFirstPrecise and what l2norm adds: that is AUX's.
namespace table {
constexpr int kNegBeta = 0;                      // -beta_i
constexpr int kRowDecay = kNegBeta + 64;         // 2^(G_i - G_ref(i))
constexpr int kRowDecayScaled = kRowDecay + 64;  // ... times scale
constexpr int kG = kRowDecayScaled + 64;         // G_i
constexpr int kColumnG = kG + 64;                // G_j, column order
constexpr int kColumnDecay = kColumnG + 64;      // [3][64] 2^(G_16w - G_j), w = 1..3, column order
constexpr int kBeta = kColumnDecay + 192;        // beta_i
constexpr int kBetaGamma = kBeta + 64;           // beta_i 2^G_i (AUX: times 1/|k_i|)
constexpr int kRho = kBetaGamma + 64;            // 2^(G_last - G_i) (AUX: times 1/|k_i|)
constexpr int kScaledGamma = kRho + 64;          // scale 2^G_i
constexpr int kChunkDecay = kScaledGamma + 64;   // 2^G_last, one number
constexpr int kFirstPrecise = kChunkDecay + 1;   // by AUX: the first token in two terms, as an integer
constexpr int kColumnNormK = kChunkDecay + 4;    // 1/|k_j|, column order; from here on for l2norm only, by AUX
constexpr int kNormK = kColumnNormK + 64;        // 1/|k_i|
constexpr int kFloats = kChunkDecay + 4, kFloatsL2Norm = kNormK + 64;

// Place of token j in a column table.
__device__ __forceinline__ int column_order(int j) { return (j & ~15) + 4 * ((j & 7) >> 1) + 2 * ((j & 15) >> 3) + (j & 1); }
}  // namespace table

// Up to so many sequences are taken in the order of their lengths.
constexpr int kMaxSorted = 256;

// One chunk's scratch for the inverse: 16x16 blocks in fp16, each four 8x8 tiles of 128 bytes (lane address 16 lane).
struct InverseScratch {
    uint8_t M[2][6 * 512];     // -L below the diagonal blocks, block (i, j) at i(i-1)/2 + j; double buffered by chunk
    uint8_t X[2][4 * 512];     // inverses of the diagonal blocks
    uint8_t X10[2][512];       // block (1, 0) of the inverse
    uint32_t weights[2][128];  // of rows of L, see store_weights in aux.cuh
};

// One piece of work, found by the load warp (items.cuh) and read by the other roles.
struct Item {
    int sequence, head, head_qk, batch;
    int slot;               // place in the workspace of the state before the segment; before the next one, for a first segment
    int bos, length;        // first token, in the row of B, and tokens
    int before;             // tokens of the sequence before the segment
    int prepared;           // place in the workspace of what was prepared of its first chunk
    int cleared;            // rows of o from bos on that are zero: the tokens of a padding sequence
    int piece;              // Outputs: columns 64 or 128 piece ..; Transition: 0 for N, 1 for M
    int read_row;           // of the states; -1: padding, of length 0
    float amplitude, bias;  // of the gate
    bool first, last;       // segment of its sequence; both: the sequence is whole
    bool exists;            // false: there are no more
    __device__ __forceinline__ int chunks() const { return (length + kChunk - 1) / kChunk; }
};

template <class C>
struct alignas(1024) Smem {
    using Tile = SmemTile<kChunk, C::D, ptx::Swizzle::B128>;           // K, Q: tokens x K
    using Values = SmemTile<kChunk, C::kColumns, ptx::Swizzle::B128>;  // V, then O in its place: tokens x columns
    using Product = SmemTile<kChunk, kChunk, ptx::Swizzle::B128>;      // A^, P: tokens x tokens
    uint8_t k[kTileStages][Tile::kBytes];
    uint8_t q[C::kOutputs ? kTileStages : 0][Tile::kBytes];
    uint8_t v[kValueStages][Values::kBytes];
    uint8_t a[C::kProductStages][Product::kBytes];
    uint8_t p[C::kOutputs ? C::kProductStages : 0][Product::kBytes];
    uint8_t second[C::kPrepared ? 2 : 0][Product::kBytes];  // second terms of A^ and P
    InverseScratch inverse[C::kAuxGroups];
    float query_norm[C::kL2Norm && C::kOutputs ? kTileStages : 0][kChunk];  // 1/|q_i|, in the stage of the tile
    float table[C::kFactorStages][C::kL2Norm ? table::kFloatsL2Norm : table::kFloats];
    Item item[kItemStages];
    uint32_t items;  // of the launch, see items.cuh
    int segment_tokens;
    int lengths[kMaxSorted];     // of the sequences, to order them by
    uint16_t order[kMaxSorted];  // the sequences, the longest first
    uint64_t tile_barriers[2 * kTileStages], value_barriers[2 * kValueStages], table_barriers[2 * C::kFactorStages],
        product_barriers[2 * C::kProductStages], item_barriers[2 * kItemStages];
    uint64_t output_ready[kValueStages];  // O of a chunk lies where its V was
    uint64_t query_norm_ready[kTileStages];
    uint64_t second_barriers[C::kPrepared ? 2 : 0];
    uint64_t tail_landed;                   // the last, short chunk of a sequence, before its rows past the end are cleared
    uint64_t inverse_ready[C::kAuxGroups];  // diagonal blocks and M of a chunk are in place
    uint64_t group_meets[kWarpArrivals == 32 ? C::kAuxGroups : 0];

    __device__ Ring<kItemStages> item_ring() { return {ptx::shared_address(item_barriers)}; }
    __device__ Ring<kTileStages> tiles() { return {ptx::shared_address(tile_barriers)}; }     // K and Q
    __device__ Ring<kValueStages> values() { return {ptx::shared_address(value_barriers)}; }  // V
    __device__ Ring<1> seconds() { return {ptx::shared_address(second_barriers)}; }
    __device__ Ring<C::kFactorStages> tables() { return {ptx::shared_address(table_barriers)}; }
    __device__ Ring<C::kProductStages> products() { return {ptx::shared_address(product_barriers)}; }  // A^ and P
};

}  // namespace linattn::cuda::gdn
