// The load warp of gdn_fwd_kernel: finds the CTA's items, and brings K, Q and V of each chunk by TMA into the rings.
#pragma once
#include "items.cuh"
#include "ptx/tma.cuh"

namespace linattn::cuda::gdn {

// Rows [rows, 64) of a tile: whole lines of 128 bytes in each panel, wherever the swizzle put their parts.
template <class Tile>
__device__ __forceinline__ void clear_rows(uint32_t tile, int rows, int lane) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; panel++)
#pragma unroll 1
        for (int at = rows * 128 + lane * 16; at < kChunk * 128; at += 512)
            ptx::st_shared_v4_u32(tile + panel * Tile::kPanelStrideBytes + at, make_uint4(0, 0, 0, 0));
}

template <class Tile>
__device__ __forceinline__ void load_tile(uint32_t tile, const CUtensorMap *map, uint32_t barrier, int column, int head,
                                          int token, int batch) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; panel++)
        ptx::cp_async_bulk_tensor_4d_load(tile + panel * Tile::kPanelStrideBytes, map, barrier, column + 64 * panel, head,
                                          token, batch);
}

// A short last chunk is followed by the next sequence's rows, which may hold anything: it lands on a barrier of its own, its
// rows past the end are cleared, and only then the consumers hear of it. Selected away, not multiplied by zero.
template <class C>
__device__ __forceinline__ void load(const KernelParams &params, const CUtensorMap *map_q, const CUtensorMap *map_k,
                                     const CUtensorMap *map_v, Smem<C> &smem) {
    using S = Smem<C>;
    static_assert(kTileStages == kValueStages, "tiles and values are filled in step");
    RingState<kTileStages> place;
    RingState<kItemStages> slot;
    uint32_t tail_phase = 0;
    for (uint32_t round = 0; round * gridDim.x < smem.items; round++) {
        smem.item_ring().wait_empty(slot);
        Item &item = smem.item[slot.stage];
        find_item<C>(params, smem, round, item);
        __syncwarp();
        const bool exists = item.exists;
        __syncwarp();
        if (!exists) continue;
        warp_arrive(smem.item_ring().full(slot.stage), threadIdx.x % 32);
        slot.advance();
        const bool has_values = C::kOutputs || item.piece == 0;
        const int lane = opaque_lane(), head_qk = item.head_qk, column = C::kOutputs ? item.piece * C::kColumns : 0;
#pragma unroll 1
        for (int at = 0; at < item.length; at += kChunk) {
            const bool tail = item.length - at < kChunk;
            const uint32_t k = ptx::shared_address(smem.k[place.stage]), v = ptx::shared_address(smem.v[place.stage]);
            const uint32_t q = C::kOutputs ? ptx::shared_address(smem.q[place.stage]) : 0;
            const uint32_t landed = ptx::shared_address(&smem.tail_landed);
            const uint32_t tile_full = smem.tiles().full(place.stage), value_full = smem.values().full(place.stage);
            constexpr uint32_t kTileBytes = S::Tile::kBytes * (C::kOutputs ? 2 : 1);
            smem.tiles().wait_empty(place);
            const bool elected =
                ptx::elect_sync();  // of lane 0 ptxas does not know that it is one, and puts a loop around each copy
            if (elected) {
                ptx::mbarrier_arrive_expect_tx(tail ? landed : tile_full, kTileBytes);
                load_tile<typename S::Tile>(k, map_k, tail ? landed : tile_full, 0, head_qk, item.bos + at, item.batch);
                if constexpr (C::kOutputs)
                    load_tile<typename S::Tile>(q, map_q, tail ? landed : tile_full, 0, head_qk, item.bos + at, item.batch);
            }
            smem.values().wait_empty(place);
            if (elected) {
                ptx::mbarrier_arrive_expect_tx(tail ? landed : value_full, has_values ? S::Values::kBytes : 0);
                if (has_values)
                    load_tile<typename S::Values>(v, map_v, tail ? landed : value_full, column, item.head, item.bos + at,
                                                  item.batch);
            } else if (kWarpArrivals == 32 && !tail) {
                ptx::mbarrier_arrive(tile_full);
                ptx::mbarrier_arrive(value_full);
            }
            if (tail) {
                __syncwarp();
                ptx::mbarrier_wait_parity(landed, tail_phase);
                tail_phase ^= 1;
                clear_rows<typename S::Tile>(k, item.length - at, lane);
                if constexpr (C::kOutputs) clear_rows<typename S::Tile>(q, item.length - at, lane);
                if (has_values) clear_rows<typename S::Values>(v, item.length - at, lane);
                ptx::fence_proxy_async_shared_cta();
                warp_arrive(tile_full, lane);
                warp_arrive(value_full, lane);
            }
            __syncwarp();
            place.advance();
        }
    }
    smem.item_ring().wait_empty(slot);
    __syncwarp();
    if (threadIdx.x % 32 == 0) smem.item[slot.stage].exists = false;
    warp_arrive(smem.item_ring().full(slot.stage), threadIdx.x % 32);
}

}  // namespace linattn::cuda::gdn
