// What the kernels of kda_fwd share: sizes, the operands that pass between them, parameters. See kda_fwd.cuh.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "common/pipeline.cuh"
#include "common/swizzle.cuh"
#include "ops.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"

namespace linattn::cuda::kda {

constexpr int kChunk = 32, kD = 128;  // tokens; K = V
constexpr int kMaxSorted = 256;       // up to so many sequences are taken in the order of their lengths

using Tile = SmemTile<kChunk, kD, ptx::Swizzle::B128>;       // tokens x channels
using Square = SmemTile<kChunk, kChunk, ptx::Swizzle::B64>;  // tokens x tokens

// Numbers of a chunk that are not matrices.
struct alignas(16) Factors {
    float gamma[kD];                           // decay of the whole chunk
    float norm_k[kChunk], beta[kChunk];        // 1/|k|, or 1 without l2norm; beta
    float beta_norm[kChunk], scale_q[kChunk];  // beta / |k|; scale / |q|
    int first_precise;                         // first token that needs the second terms; kChunk: none
};

// What the scan reads of a chunk besides V, laid out as it lies in shared memory there.
struct alignas(1024) Operands {
    uint8_t k_start[Tile::kBytes];   // K~: k times the decay since the start of the chunk
    uint8_t k_end[2][Tile::kBytes];  // K^: k times the decay to the end of the chunk, in two terms
    uint8_t t[2][Square::kBytes];    // T^, in two terms
    uint8_t q_start[Tile::kBytes];   // Q~, as K~; from here on only outputs need it
    uint8_t a[2][Square::kBytes];    // A, in two terms
    Factors factors;
};

// A call is computed in slabs of chunks, so that the workspace stays bounded: slab_chunks of them, counted through the sequences,
// from first_chunk on. The workspace has one Operands for each chunk of a slab and value head.
struct KernelParams {
    DeltaParams p;
    float scale, lower_bound;  // of p, in float
    int first_chunk, slab_chunks;
    Operands *g_operands;
    float *g_carry;     // [N][HV][V][K], the states between slabs
    int cut;            // sequences are cut into at most so many segments together, whose transitions are no more; 0: they are not
    float *g_segments;  // [cut][HV][2][D][D], V-first: the state before a segment that is not its sequence's first; its M
};

struct TensorMaps {
    CUtensorMap q, k, v, g;
};

}  // namespace linattn::cuda::kda
