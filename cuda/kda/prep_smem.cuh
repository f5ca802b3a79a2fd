// Shared memory of the preparation of one chunk.
#pragma once
#include "items.cuh"

namespace linattn::cuda::kda {

constexpr int kPitch = 36;  // floats a row of a matrix of tokens x tokens

// Sums over one warp's channels, four numbers at a time as its lanes have them: where they belong says Place (solve.cuh).
constexpr int kPieces = 248;  // 4 x 248 = 2 x 32 x 31 / 2: A and M below the diagonal

template <int D>
struct alignas(1024) PrepSmem {
    uint8_t start[Pair<D>::kBytes];  // k and q, then K~ and Q~ in their places: as in Operands
    uint8_t k_end[Tile<D>::kBytes];
    uint8_t g[kChunk * D * 4];  // as given, fp32 or 2 bytes
    uint8_t a[Square::kBytes];
    Factors<D> factors;
    union {
        float4 partial[4][kPieces];
        float t[kChunk * kPitch];  // (I + L)^-1, when the sums are added
    };
    float l[kChunk * kPitch];  // L below the diagonal
    float y[16 * 16];
    float kk[4][kChunk], qk[4][kChunk], qq[4][kChunk];  // sums of one token, one a warp
    float inverse_k[4][kChunk], inverse_q[4][kChunk];   // powers of 2 near 1/|k|, 1/|q|; each warp has its own
    float diagonal[kChunk], beta_k[kChunk];             // of A; as in the factors
    float bias[D], amplitude;                           // of the gates: see activate()
    int rows;                                           // tokens of the chunk
    uint64_t landed;
};
static_assert(3 * (sizeof(PrepSmem<128>) + 1024) <= 228 * 1024, "three CTAs on an SM");

}  // namespace linattn::cuda::kda
