// Checkpoints in bulk (Config::kBulkCheckpoints): S goes to shared memory and from there, by the store warp's tensor copies, to
// global memory while the next chunks go on. Other kernels store it from registers (states.cuh), which holds the state warpgroups
// until most of it has left the SM, and AUX's accesses to shared memory behind it in the queue.
//
// A state warpgroup's 64 columns of V leave in two halves of 64 rows of K, 16 KB each in fp32. There is no room for them but in
// tiles that nobody needs just then:
//   64 columns of V a CTA: Q and K of the chunk before the checkpoint.
//   128: warpgroup 0, which is half a chunk ahead: a stage of V's ring; Q, once warpgroup 1 has read it. Warpgroup 1: K, which
//   warpgroup 0 has read when its first half is written; another stage of V's ring. So the load warp leaves two entries of that
//   ring without a load behind the V of such a chunk.
// K and Q go back to the load warp when the store warp, too, says so: at once, or when the copies have been read. AUX wants the
// next tiles there a chunk later, which is about what the copies and the loads take.
// The load warp finds the row of each checkpoint. What the others hear of it is Smem::checkpoint of the tile's stage, which lives
// as long as the tile: -1, or 2 row + parity of the count of checkpoints, the phase of their barriers.
//
// Boxes of 64 rows of 128 bytes, swizzled: rows of K where V is contiguous, otherwise rows of V.
#pragma once
#include "items.cuh"
#include "ptx/mma.cuh"
#include "ptx/tma.cuh"

namespace linattn::cuda::gdn {

constexpr uint32_t kCheckpointBox = 64 * 128;  // bytes

// The pieces with 128 columns, in the order in which they leave: those of warpgroup 0 are in V's ring and in Q.
enum CheckpointPiece { kInQueries, kInKeys, kFirstInValues, kSecondInValues };

__device__ __forceinline__ bool rows_of_k(const Tensor &checkpoints) { return checkpoints.stride[3] == 1; }

// Checkpoints of the sequences before one. With what mark_checkpoint() adds it is checkpoint_row() of common/sequences.cuh, in two
// steps for want of registers in the loop over chunks. By a converged warp.
__device__ __forceinline__ int checkpoints_before(const DeltaParams &p, int sequence) {
    const int every = static_cast<int>(p.checkpoint_every);
    if (!p.cu_seqlens) return sequence * (static_cast<int>(p.T) / every);
    int before = 0;
    for (int n = threadIdx.x % 32; n < sequence; n += 32) {
        int bos, length;
        sequence_range(p, n, bos, length);
        before += length / every;
    }
    return __reduce_add_sync(~0u, before);
}

// The load warp's: the item's first checkpoint. By a converged warp.
__device__ __forceinline__ void begin_checkpoints(const DeltaParams &p, NextCheckpoint &next, const Item &item) {
    const int every = static_cast<int>(p.checkpoint_every), number = item.before / every;
    const int before = p.checkpoint_indices ? 0 : checkpoints_before(p, item.sequence);
    if (threadIdx.x % 32 != 0) return;
    next.at = every - item.before % every - kChunk, next.number = number, next.before = before;
    next.final_row = p.state_out.data == p.checkpoints.data ? pool_row(p.write_indices, item.sequence, p.F) : -1;
}

// The load warp's: says of a stage that it has waited for whether there is a checkpoint after the chunk of tokens at .. at + 63 of the
// item. By a converged warp.
template <class C>
__device__ __forceinline__ void mark_checkpoint(const DeltaParams &p, Smem<C> &smem, const Item &item, int at, int stage) {
    if (threadIdx.x % 32 == 0) {
        NextCheckpoint &next = *smem.next_checkpoint;
        int code = -1;
        if (at == next.at && at + kChunk <= item.length) {
            const int number = next.number;
            int row = next.before + number;
            if (p.checkpoint_indices)
                row = number < p.M ? load_index(p.checkpoint_indices, item.sequence * p.checkpoint_indices.stride[0] +
                                                                          number * p.checkpoint_indices.stride[1])
                                   : -1;
            // The final state comes last where it has the same place.
            if (row >= 0 && row < p.C && row != next.final_row) code = 2 * row + (next.count++ & 1);
            next.at = at + static_cast<int>(p.checkpoint_every), next.number = number + 1;
        }
        smem.checkpoint[stage] = code;
    }
    __syncwarp();
}

// A state warpgroup's: half kHalf of its S to its place.
template <int kHalf, int kCount>
__device__ __forceinline__ void write_half(const float (&s)[kCount], const Tensor &checkpoints, uint32_t to, int lane) {
    const int w = threadIdx.x / 32 % 4, g = lane >> 2, q = lane & 3;
    constexpr int kFirst = kHalf * (kCount / 2);
    const bool k_rows = rows_of_k(checkpoints);
    if (checkpoints.dtype == DType::F32) {
        if (k_rows) {  // (k, v) at row 2q + i + 8j, column 8r + g of the warp's 16: the lanes of a store have 32 banks
            const uint32_t first = to + w / 2 * kCheckpointBox + 2 * q * 128 + ((w % 2 * 4 + g / 4) ^ 2 * q) * 16 + g % 4 * 4;
#pragma unroll
            for (int ri = 0; ri < 4; ri++) {
                const uint32_t at = (first ^ (ri / 2 * 32 + ri % 2 * 16)) + ri % 2 * 128;
#pragma unroll
                for (int j = 0; j < kCount / 8; j++) ptx::st_shared_f32(at + j * 1024, s[kFirst + 4 * j + ri]);
            }
        } else {  // two lanes to a bank; stores of two words would make ptxas keep S elsewhere than in the accumulators
            const uint32_t first = to + (16 * w + g) * 128 + (q / 2 ^ g) * 16 + q % 2 * 8;
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int i = 0; i < kCount / 8; i++)
                    ptx::st_shared_f32((first ^ j * 32) + i / 4 * kCheckpointBox + i / 2 % 2 * 1024 + i % 2 * 4,
                                       s[kFirst + 16 * (i / 4) + 4 * j + i % 4]);
        }
        return;
    }
    // As O is stored, and the same without the transposition.
    const uint32_t at = k_rows ? to + ((lane & 7) + (lane & 16) / 2) * 128 + ((w * 2 + (lane & 8) / 8) ^ (lane & 7)) * 16
                               : to + (16 * w + (lane & 15)) * 128 + ((lane >> 4) ^ (lane & 7)) * 16;
#pragma unroll
    for (int i = 0; i < kCount / 16; i++) {
        uint32_t r[4];
#pragma unroll
        for (int j = 0; j < 4; j++) r[j] = ptx::cvt_rn_bf16x2(s[kFirst + 8 * i + 2 * j], s[kFirst + 8 * i + 2 * j + 1]);
        if (k_rows)
            ptx::stmatrix_x4_trans(at + i * 2048, r);
        else
            ptx::stmatrix_x4(at ^ i * 32, r);
    }
}

// A state warpgroup's: its S to its places. stage: of the tile of the chunk before; entries: of V's ring so far.
template <class C>
__device__ __forceinline__ void write_checkpoint(Smem<C> &smem, const float (&s)[C::D / 2], const Tensor &checkpoints, int code,
                                                 int stage, int group, uint32_t entries) {
    const int lane = opaque_lane();
    const uint32_t q = ptx::shared_address(smem.q[stage]), k = ptx::shared_address(smem.k[stage]);
    const auto written = [&](int piece) { return ptx::shared_address(&smem.checkpoint_written[piece]); };
    if constexpr (C::kCheckpointsInValues) {
        const uint32_t parity = code & 1;
        const bool leads = group == 0;
        const RingState<C::kValueStages> place = ring_place<C::kValueStages>(entries + group);
        const uint32_t v = ptx::shared_address(smem.v[place.stage]), v_full = smem.values().full(place.stage);
        ptx::mbarrier_wait_parity(leads ? v_full : written(kFirstInValues), leads ? place.phase : parity);
        write_half<0>(s, checkpoints, leads ? v : k, lane);
        ptx::fence_proxy_async_shared_cta();
        warp_arrive(written(leads ? kFirstInValues : kInKeys), lane);
        ptx::mbarrier_wait_parity(leads ? ptx::shared_address(smem.queries_read) : v_full, leads ? parity : place.phase);
        write_half<1>(s, checkpoints, leads ? q : v, lane);
        ptx::fence_proxy_async_shared_cta();
        warp_arrive(written(leads ? kInQueries : kSecondInValues), lane);
    } else {
        write_half<0>(s, checkpoints, q, lane);
        write_half<1>(s, checkpoints, k, lane);
        ptx::fence_proxy_async_shared_cta();
        warp_arrive(written(0), lane);
    }
}

// The load warp's: entries of V's ring without a load, behind the V of a chunk with a checkpoint.
template <class C>
__device__ __forceinline__ void skip_values(Smem<C> &smem, int stage, RingState<C::kValueStages> &value, int lane) {
    if (smem.checkpoint[stage] < 0) return;
#pragma unroll 1
    for (int i = 0; i < 2; i++, value.advance()) {
        smem.values().wait_empty(value);
        warp_arrive(smem.values().full(value.stage), lane);
    }
}

// The store warp's: copies half a warpgroup's S, from a column of V and a row of K on. By one lane.
template <class C>
__device__ __forceinline__ void copy_half(const KernelParams &params, const CUtensorMap *map, const Item &item, int code,
                                          const uint8_t *from, int column, int k) {
    const Tensor &checkpoints = params.p.checkpoints;
    column += item.piece * C::kColumns;
    const bool k_rows = rows_of_k(checkpoints);
    const int inner = k_rows ? column : k, outer = k_rows ? k : column, row = code >> 1;
    const uint32_t source = ptx::shared_address(from);
    ptx::cp_async_bulk_tensor_4d_store(map, source, inner, item.head, outer, row);
    if (checkpoints.dtype == DType::F32)
        ptx::cp_async_bulk_tensor_4d_store(map, source + kCheckpointBox, inner + 32, item.head, outer, row);
}

// The store warp's: a chunk's O and the checkpoint after it; what they lie in goes back to the load warp. store_o() waits for O and
// commits its copy.
template <class C, class F>
__device__ __forceinline__ void store_with_checkpoint(const KernelParams &params, const CUtensorMap *map, Smem<C> &smem,
                                                      const Item &item, int code, const RingState<kTileStages> &tile,
                                                      RingState<C::kValueStages> &value, F store_o) {
    const int lane = threadIdx.x % 32;
    const auto written = [&](int piece) {
        ptx::mbarrier_wait_parity(ptx::shared_address(&smem.checkpoint_written[piece]), code & 1);
    };
    const auto copy = [&](const uint8_t *from, int column, int k) {
        if (lane == 0) copy_half<C>(params, map, item, code, from, column, k);
    };
    const auto commit = [&] {
        if (lane == 0) ptx::cp_async_bulk_commit_group();
    };
    // Rows may repeat: the last checkpoint stays.
    if (lane == 0) ptx::cp_async_bulk_wait_group<0>();
    RingState<C::kValueStages> last = value;
    if constexpr (C::kCheckpointsInValues) {
        // In the order in which the places are wanted: AUX waits for the next tiles, the state loop later for the next V.
        RingState<C::kValueStages> first = value;
        first.advance();
        last = first, last.advance();
        written(kInQueries);
        copy(smem.q[tile.stage], 0, 64), commit();
        written(kInKeys);
        copy(smem.k[tile.stage], 64, 0), commit();
        store_o();
        written(kFirstInValues);
        copy(smem.v[first.stage], 0, 0), commit();
        written(kSecondInValues);
        copy(smem.v[last.stage], 64, 64), commit();
        if (lane == 0) ptx::cp_async_bulk_wait_group_read<3>();
        warp_arrive(smem.tiles().empty(tile.stage), lane);
        if (lane == 0) ptx::cp_async_bulk_wait_group_read<2>();
        warp_arrive(smem.values().empty(value.stage), lane);
        if (lane == 0) ptx::cp_async_bulk_wait_group_read<0>();
        warp_arrive(smem.values().empty(first.stage), lane);
        warp_arrive(smem.values().empty(last.stage), lane);
    } else {
        store_o();
        written(0);
        copy(smem.q[tile.stage], 0, 0);
        copy(smem.k[tile.stage], 0, 64), commit();
        if (lane == 0) ptx::cp_async_bulk_wait_group_read<1>();
        warp_arrive(smem.values().empty(value.stage), lane);
        if (lane == 0) ptx::cp_async_bulk_wait_group_read<0>();
        warp_arrive(smem.tiles().empty(tile.stage), lane);
    }
    value = last;
}

}  // namespace linattn::cuda::gdn
