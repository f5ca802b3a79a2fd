// Shared memory of the preparation of one chunk.
#pragma once
#include "items.cuh"

namespace linattn::cuda::kda {

// Sums over channels, of one warp: X[t][s] = A_ts for s < t, X[s][t] = M_ts.
constexpr int kPitch = 36;
struct Partial {
    float x[kChunk * kPitch];
};

// A warp's scratch: operands of two levels of the tree, 16 channels; two blocks of 16 tokens each. See tree.cuh.
constexpr int kBlockBytes = 1024, kLevelBytes = 2 * kBlockBytes, kScratchBytes = 2 * kLevelBytes;

// Four CTAs on an SM: 56 KB. What is not needed any more makes place.
struct alignas(1024) PrepSmem {
    uint8_t k[Tile::kBytes];
    union {
        uint8_t q[Tile::kBytes];  // until the tree is done
        struct {
            float l[kChunk * kPitch];  // L below the diagonal
            float y[16 * 16];
        };
    };
    float g[kChunk * kD];  // as given, fp32 or 2 bytes
    union {
        union {  // one a warp; its sums, when the tree is done
            uint8_t scratch[kScratchBytes];
            Partial partial;
        } warp[4];
        float t[kChunk * kPitch];  // (I + L)^-1, when the sums are added
    };
    float kk[4][kChunk], qk[4][kChunk], qq[4][kChunk];  // sums of one token, one a warp
    Factors factors;
    float inverse_k[4][kChunk], inverse_q[4][kChunk];  // powers of 2 near 1/|k|, 1/|q|; each warp has its own
    float diagonal[kChunk], beta_k[kChunk];            // of A; as in the factors
    float bias[kD], amplitude;                         // of the gates: see activate()
    int rows;                                          // tokens of the chunk
    uint64_t landed;
};
static_assert(4 * (sizeof(PrepSmem) + 1024) <= 228 * 1024, "four CTAs on an SM");

}  // namespace linattn::cuda::kda
