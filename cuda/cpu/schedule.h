// How the work of a call is cut: one task per (sequence, value head), or per group of column blocks where there are few.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../ops.h"
#include "memory.h"
#include "parallel.h"

namespace linattn::cpu {

constexpr int64_t kChunk = 64;  // tokens prepared at a time

// save = "states": the state after every kChunk tokens of each sequence, [rows][HV][K][V], sequence after sequence.
inline int64_t saved_rows(const DeltaParams &p) { return p.B * (p.T / kChunk); }
inline Tensor saved_states(const DeltaParams &p) {
    Tensor t;
    t.data = p.saved.data;
    t.dtype = p.q.dtype == DType::F64 ? DType::F64 : DType::F32;
    t.stride[0] = p.HV * p.K * p.V, t.stride[1] = p.K * p.V, t.stride[2] = p.V, t.stride[3] = 1;
    return t;
}

struct Schedule {
    int64_t N = 0, HV = 0, blocks = 0, groups = 1;
    int workers = 1;

    // `updates` state elements are updated in all, `moved_bytes` of states are read and written.
    Schedule(int64_t N_, int64_t HV_, int64_t V, int64_t cols, double updates, double moved_bytes)
        : N(N_), HV(HV_), blocks((V + cols - 1) / cols) {
        // Rough cost of one core, and of starting a thread: a thread must save more than it costs.
        const double us = updates * 1e-4 + moved_bytes * 1e-4;
        constexpr double kWorthAThreadUs = 50;
        if (N * HV < 1 || us < 2 * kWorthAThreadUs) return;
        const int limit = static_cast<int>(std::min<double>(thread_limit(), us / kWorthAThreadUs));
        // Columns do not depend on each other, so that the cut never shows in the results.
        groups = std::clamp<int64_t>((4 * limit + N * HV - 1) / (N * HV), 1, limit > 1 ? blocks : 1);
        workers = static_cast<int>(std::min<int64_t>(limit, tasks()));
    }

    int64_t tasks() const { return N * HV * groups; }
    int64_t blocks_per_group() const { return (blocks + groups - 1) / groups; }
    int64_t sequence(int64_t task) const { return task / groups / HV; }
    int64_t head(int64_t task) const { return task / groups % HV; }
    int64_t first_block(int64_t task) const { return std::min(blocks, task % groups * blocks_per_group()); }
    int64_t end_block(int64_t task) const { return std::min(blocks, first_block(task) + blocks_per_group()); }
};

}  // namespace linattn::cpu
