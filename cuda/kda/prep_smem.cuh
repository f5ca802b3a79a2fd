// Shared memory of the preparation of one chunk.
#pragma once
#include "items.cuh"

namespace linattn::cuda::kda {

// Sums over channels, of one warp: X[t][s] = A_ts for s < t, X[s][t] = M_ts.
constexpr int kPitch = 36;
struct Partial {
    float x[kChunk * kPitch];
    float kk[kChunk], qk[kChunk], qq[kChunk];  // of one token
};

// A warp's scratch: operands of two levels of the tree, 16 channels; two blocks of 16 tokens each. See tree.cuh.
constexpr int kBlockBytes = 1024, kLevelBytes = 2 * kBlockBytes, kScratchBytes = 2 * kLevelBytes;

struct Solve {
    float l[kChunk * kPitch], t[kChunk * kPitch];  // L below the diagonal; (I + L)^-1
    float y[16 * 16];
};

struct alignas(1024) PrepSmem {
    uint8_t k[Tile::kBytes], q[Tile::kBytes];
    float g[kChunk * kD];  // as given, fp32 or 2 bytes
    Partial partial[4];    // one a warp
    union {
        uint8_t scratch[4 * kScratchBytes];  // one a warp
        Solve solve;
    };
    Factors factors;
    float inverse_k[kChunk], inverse_q[kChunk];  // powers of 2 near 1/|k|, 1/|q|
    float diagonal[kChunk];                      // of A
    uint64_t landed;
};

}  // namespace linattn::cuda::kda
