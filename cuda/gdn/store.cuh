// The store warp of gdn_fwd_kernel: O of each chunk from where V was to global memory, and the rows of o that nobody computes.
#pragma once
#include "items.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/tma.cuh"

namespace linattn::cuda::gdn {

// Rows 0 .. rows - 1 of o from the tile on, or zeros without a tile. A lane has 16 bytes of every 256 / kColumns-th row.
template <class C>
__device__ __forceinline__ void store_rows(const KernelParams &params, const Item &item, int token, int rows, uint32_t tile) {
    using Values = typename Smem<C>::Values;
    const Tensor &o = params.p.o;
    constexpr int kUnits = C::kColumns / 8, kRows = 32 / kUnits;
    const int lane = opaque_lane(), unit = lane % kUnits;
    int row = lane / kUnits;
    char *to = o.data + 2 * (item.batch * o.stride[0] + (token + row) * o.stride[1] + item.head * o.stride[2] +
                             item.piece * C::kColumns + 8 * unit);
#pragma unroll 1
    for (; row < rows; row += kRows, to += 2 * kRows * o.stride[1])
        *reinterpret_cast<uint4 *>(to) =
            tile != 0 ? ptx::ld_shared_v4_u32(tile + Values::offset(row, 8 * unit)) : make_uint4(0, 0, 0, 0);
}

// The rows of o past the last sequence, where o is ours.
template <class C>
__device__ __forceinline__ void clear_tail(const DeltaParams &p) {
    constexpr int kUnits = C::D / 8, kHeads = 32 / kUnits;  // of 16 bytes in a head's row; heads at a time
    const int lane = opaque_lane(), T = static_cast<int>(p.T);
#pragma unroll 1
    for (int token = sequence_start(p, static_cast<int>(p.N)) + blockIdx.x; token < T; token += gridDim.x) {
        char *to = p.o.data + 2 * (token * p.o.stride[1] + lane / kUnits * p.o.stride[2] + lane % kUnits * 8);
#pragma unroll 1
        for (int head = lane / kUnits; head < static_cast<int>(p.HV); head += kHeads, to += 2 * kHeads * p.o.stride[2])
            *reinterpret_cast<uint4 *>(to) = make_uint4(0, 0, 0, 0);
    }
}

// The first rows of o and of the final state asked for in L2: stores to pages that nothing else touched then find them translated.
__device__ __forceinline__ void prefetch_ends(const DeltaParams &p, const Item &item) {
    if (item.length == 0) return;
    ptx::prefetch_global_l2(p.o.data + 2 * (item.batch * p.o.stride[0] + item.bos * p.o.stride[1] + item.head * p.o.stride[2]));
    if (!item.last || !p.state_out) return;
    const int64_t row = pool_row(p.write_indices, item.sequence, p.F);
    if (row < 0) return;
    const int64_t at = row * p.state_out.stride[0] + item.head * p.state_out.stride[1];
    ptx::prefetch_global_l2(p.state_out.data + (p.state_out.dtype == DType::F32 ? 4 : 2) * at);
}

// A whole chunk goes by TMA; the rows of a short one by this warp, because the rows after it are another sequence's.
template <class C>
__device__ __forceinline__ void store_outputs(const KernelParams &params, const CUtensorMap *map_o, Smem<C> &smem) {
    using Values = typename Smem<C>::Values;
    RingState<kValueStages> value;
    // While the first chunk is under way; of cut sequences by the launch that has every CTA.
    if (params.part != Part::First) clear_checkpoints<C::D>(params.p, blockIdx.x, gridDim.x, opaque_lane(), 32);
    ItemReader<C> items{smem};
    while (true) {
        const Item &item = items.next();
        if (!item.exists) break;
        if constexpr (C::kStateGroups == 1) prefetch_ends(params.p, item);  // with two, 24 registers are too few
#pragma unroll 1
        for (int at = 0; at < item.length; at += kChunk) {
            const uint32_t tile = ptx::shared_address(smem.v[value.stage]);
            ptx::mbarrier_wait_parity(ptx::shared_address(&smem.output_ready[value.stage]), value.phase);
            if (item.length - at < kChunk) {
                store_rows<C>(params, item, item.bos + at, item.length - at, tile);
            } else if (threadIdx.x % 32 == 0) {
#pragma unroll
                for (int panel = 0; panel < Values::kPanels; panel++)
                    ptx::cp_async_bulk_tensor_4d_store(map_o, tile + panel * Values::kPanelStrideBytes,
                                                       item.piece * C::kColumns + 64 * panel, item.head, item.bos + at,
                                                       item.batch);
                ptx::cp_async_bulk_commit_group();
                ptx::cp_async_bulk_wait_group_read<0>();
            }
            warp_arrive(smem.values().empty(value.stage), threadIdx.x % 32);
            value.advance();
        }
        store_rows<C>(params, item, item.bos, item.cleared, 0);
    }
    if (params.p.zero_tail && params.p.cu_seqlens) clear_tail<C>(params.p);
}

}  // namespace linattn::cuda::gdn
