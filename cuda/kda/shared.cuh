// What the kernels of kda_fwd share: sizes, the operands that pass between them, parameters. See kda_fwd.cuh.
#pragma once
#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "common/join.cuh"
#include "common/pipeline.cuh"
#include "common/swizzle.cuh"
#include "ops.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"

namespace linattn::cuda::kda {

constexpr int kChunk = 32;       // tokens
constexpr int kMaxSorted = 256;  // up to so many sequences are taken in the order of their lengths

// D = K = V: 128 or 64.
template <int D>
using Tile = SmemTile<kChunk, D, ptx::Swizzle::B128>;  // tokens x channels
template <int D>
using Pair = SmemTile<2 * kChunk, D, ptx::Swizzle::B128>;    // k's tokens, then q's
constexpr uint32_t kQueries = kChunk * 128;                  // from a row of k to that of q in a Pair
using Square = SmemTile<kChunk, kChunk, ptx::Swizzle::B64>;  // tokens x tokens

// Numbers of a chunk that are not matrices.
template <int D>
struct alignas(1024) Factors {
    float gamma[D];  // decay of the whole chunk; channel c at gamma_place(c)
    // X = beta_v V - beta_k K~ S, of two tokens (v, v, k, k): beta, and once or twice what k is to be multiplied by.
    float4 beta[kChunk / 2];
    float scale_q[kChunk];  // of a row of O
    int first_precise;      // first token that needs the second terms; kChunk: none
};

// A lane of the scan has channels 2 q, 2 q + 1 of each eight: those of two eights side by side.
template <class Int>
__host__ __device__ __forceinline__ constexpr Int gamma_place(Int c) {
    return c / 16 * 16 + c % 8 / 2 * 4 + c / 8 % 2 * 2 + c % 2;
}

// What the scan reads of a chunk besides V, laid out as it lies in shared memory there. k and q have a length of 1 to 2 in all
// of it: multiplied by a power of 2.
template <int D>
struct alignas(1024) Operands {
    uint8_t start[Pair<D>::kBytes];  // K~, Q~: k, q times the decay since the start of the chunk
    uint8_t k_end[Tile<D>::kBytes];  // K^: k times the decay to the end of the chunk, in fp16
    uint8_t t[Square::kBytes];       // T^
    uint8_t a[Square::kBytes];       // A, in fp16
    Factors<D> factors;
    // Second terms, only there if a token of the chunk needs them.
    uint8_t k_end_low[Tile<D>::kBytes], t_low[Square::kBytes], a_low[Square::kBytes];
};

// Of a cut sequence: place of segment 1 in the workspace, and how many states follow from the one before it.
struct Joined {
    int slot, hops;
};

// A call is computed in slabs of chunks, so that the workspace stays bounded: slab_chunks of them, counted through the
// sequences, from first_chunk on. The workspace has one Operands for each chunk of a slab and value head.
struct KernelParams {
    DeltaParams p;
    float scale, lower_bound;  // of p, in float
    uint32_t group;            // value heads of a head of q and k
    int first_chunk, slab_chunks;
    char *g_operands;
    int *g_precise;     // [slab_chunks][HV], first_precise of each
    float *g_carry;     // [N][HV][V][K], the states between slabs, with powers of 2, then those, [N][HV][V]
    int cut;            // sequences are cut into segments for so many CTAs a head at most; 0: they are not
    float *g_segments;  // [slots][HV][kSlotFloats]: the state before a segment, V-first; its M, K-first
    void *g_items;      // [2][cut * HV] of Item: what each CTA of the two launches of cut sequences does (cut.cuh)
    Joined *g_joins;    // [N]
};

struct TensorMaps {
    CUtensorMap q, k, v, g;
};

}  // namespace linattn::cuda::kda
