// The store warp of gdn_fwd_kernel: O of each chunk from where V was to global memory, and the rows of o that nobody computes.
#pragma once
#include "items.cuh"
#include "ptx/tma.cuh"

namespace linattn::cuda::gdn {

__device__ __forceinline__ char *output_row(const DeltaParams &p, int batch, int64_t token, int head) {
    return p.o.data + 2 * (batch * p.o.stride[0] + token * p.o.stride[1] + head * p.o.stride[2]);
}

// A whole chunk goes by TMA; the rows of a short one by this warp, because the rows after it are another sequence's.
template <class C>
__device__ __forceinline__ void store_outputs(const KernelParams &params, const CUtensorMap *map_o, Smem<C> &smem,
                                              uint32_t items) {
    using Values = typename Smem<C>::Values;
    const DeltaParams &p = params.p;
    const int lane = threadIdx.x % 32;
    RingState<kValueStages> value;
    for (uint32_t index = blockIdx.x; index < items; index += gridDim.x) {
        const Item item = make_item<C>(params, smem.segment_tokens, index);
        const int column = item.piece * C::kColumns;
        for (int at = 0; at < item.length; at += kChunk) {
            const uint32_t tile = ptx::shared_address(smem.v[value.stage]);
            ptx::mbarrier_wait_parity(ptx::shared_address(&smem.output_ready[value.stage]), value.phase);
            if (item.length - at >= kChunk) {
                if (lane == 0) {
#pragma unroll
                    for (int panel = 0; panel < Values::kPanels; panel++)
                        ptx::cp_async_bulk_tensor_4d_store(map_o, tile + panel * Values::kPanelStrideBytes, column + 64 * panel,
                                                           item.head, item.bos + at, item.batch);
                    ptx::cp_async_bulk_commit_group();
                    ptx::cp_async_bulk_wait_group_read<0>();
                }
            } else {
                constexpr int kUnits = C::kColumns / 8;
                for (int i = lane; i < (item.length - at) * kUnits; i += 32) {
                    const int row = i / kUnits, unit = i % kUnits;
                    const uint4 x = ptx::ld_shared_v4_u32(tile + Values::offset(row, 8 * unit));
                    *reinterpret_cast<uint4 *>(output_row(p, item.batch, item.bos + at + row, item.head) + 2 * column +
                                               16 * unit) = x;
                }
            }
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(smem.values().empty(value.stage));
            value.advance();
        }
        if (!item.exists || read_row(p, item.sequence) >= 0) continue;
        // Padding: the outputs of its tokens are zero. The first segment's item does all of them.
        if (!item.first) continue;
        int bos, length;
        sequence_range(p, item.sequence, bos, length);
        for (int i = lane; i < length * (C::kColumns / 8); i += 32)
            *reinterpret_cast<uint4 *>(output_row(p, item.batch, bos + i / (C::kColumns / 8), item.head) + 2 * column +
                                       16 * (i % (C::kColumns / 8))) = make_uint4(0, 0, 0, 0);
    }
    if (!p.zero_tail || !p.cu_seqlens) return;
    const int units = static_cast<int>(p.HV) * (C::D / 8);
    for (int token = sequence_start(p, static_cast<int>(p.N)) + blockIdx.x; token < p.T; token += gridDim.x)
        for (int i = lane; i < units; i += 32)
            *reinterpret_cast<uint4 *>(output_row(p, 0, token, i / (C::D / 8)) + 16 * (i % (C::D / 8))) =
                make_uint4(0, 0, 0, 0);
}

}  // namespace linattn::cuda::gdn
