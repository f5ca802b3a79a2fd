// Shared memory of the preparation of one chunk.
#pragma once
#include "items.cuh"

namespace linattn::cuda::kda {

constexpr int kPitch = 36;  // floats a row of a matrix of tokens x tokens

// A warp has D / 4 channels, 16 at a time: a k-step of its products.
constexpr int kPrepWarps = 4;
template <int D>
constexpr int kPrepSteps = D / 64;

// Sums over one warp's channels, four numbers at a time as its lanes have them: where they belong says Place (solve.cuh), or
// RatioPlace (ratio.cuh).
constexpr int kPieces = 248;  // 4 x 248 = 2 x 32 x 31 / 2: A and M below the diagonal
constexpr int kRatioPieces = 256;

template <int D>
struct alignas(1024) PrepSmem {
    uint8_t start[Pair<D>::kBytes];  // k and q, then K~ and Q~ in their places: as in Operands
    union {
        uint8_t g[kChunk * D * 4];     // as given, fp32 or 2 bytes
        struct {                       // when they have been used
            float l[kChunk * kPitch];  // L below the diagonal
            float y[16 * 16];
        };
    };
    uint8_t a[Square::kBytes];
    Factors<D> factors;
    union {
        float4 partial[kPrepWarps][kPieces];
        float4 ratio_partial[kPrepWarps][kRatioPieces];
        float t[kChunk * kPitch];  // (I + L)^-1, when the sums are added
    };
    float kk[kPrepWarps][kChunk], qk[kPrepWarps][kChunk], qq[kPrepWarps][kChunk];  // sums of one token, one a warp
    float inverse_k[kChunk], inverse_q[kChunk];                                    // powers of 2 near 1/|k|, 1/|q|
    float diagonal[kChunk], beta_k[kChunk];                                        // of A; as in the factors
    float bias[D], amplitude;                                                      // of the gates: see activate()
    int rows, token, batch;  // tokens of the chunk, 0 where there is none; the first one
    uint64_t landed;
};
static_assert(4 * (sizeof(PrepSmem<128>) + 1024) <= 228 * 1024, "four CTAs on an SM");

}  // namespace linattn::cuda::kda
