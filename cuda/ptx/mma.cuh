// Warp-level matrix instructions: mma.sync, ldmatrix, stmatrix, movmatrix. g = lane / 4, q = lane % 4 below. All threads of a
// converged warp execute each of them. PTX ISA 9.7.14.5.
//
// m16n8k16: A a[0] = (g, 2q..2q+1), a[1] = (g+8, 2q..), a[2] = (g, 2q+8..), a[3] = (g+8, 2q+8..);
//           B (k, n) b[0] = (2q..2q+1, g), b[1] = (2q+8.., g); C, D c[0..1] = (g, 2q..2q+1), c[2..3] = (g+8, 2q..2q+1).
// An m64nNk16 wgmma gives each of its warps 16 rows in the same form, so a pair of its 8-column groups packs into one A
// fragment.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace linattn::ptx {

// 9.7.14.5 mma.m16n8k16, D = A B + D, fp32 accumulation; T is __nv_bfloat16 or __half.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

// 9.7.14.5 mma.m16n8k8: a[0] = (g, 2q..), a[1] = (g+8, 2q..), b = (2q.., g).
template <class T>
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b);

#define LINATTN_MMA(T, NAME)                                                                                           \
    template <>                                                                                                        \
    __device__ __forceinline__ void mma_m16n8k16<T>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                                            \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                            \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                  \
    }                                                                                                                  \
    template <>                                                                                                        \
    __device__ __forceinline__ void mma_m16n8k8<T>(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {                \
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." NAME "." NAME                                             \
                     ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"                                        \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(b));                                                                  \
    }
LINATTN_MMA(__nv_bfloat16, "bf16")
LINATTN_MMA(__half, "f16")
#undef LINATTN_MMA

// 9.7.14.5 mma.m16n8k8 on tf32 (operands from cvt_rna_tf32; other low bits are ignored, that is truncated):
// a[0] = (g, q), a[1] = (g+8, q), a[2] = (g, q+4), a[3] = (g+8, q+4); b0 = (q, g), b1 = (q+4, g).
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 9.7.14.5 ldmatrix: 8x8 matrices of 16-bit elements. Lanes 8i..8i+7 give the addresses (multiples of 16) of the rows of matrix
// i; r[i] = elements (g, 2q), (g, 2q+1) of it, or with .trans (2q, g), (2q+1, g). x1 and x2 ignore the other lanes' addresses.
// Eight rows of one matrix in eight different 16-byte bank groups make it conflict-free. Weak generic-proxy load: needs a
// barrier after other threads' stores.
#define LINATTN_LDMATRIX(NAME, TRANS)                                                                                         \
    __device__ __forceinline__ void ldmatrix_x1##NAME(uint32_t (&r)[1], uint32_t address) {                                   \
        asm volatile("ldmatrix.sync.aligned.m8n8.x1" TRANS ".shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(address) : "memory"); \
    }                                                                                                                         \
    __device__ __forceinline__ void ldmatrix_x2##NAME(uint32_t (&r)[2], uint32_t address) {                                   \
        asm volatile("ldmatrix.sync.aligned.m8n8.x2" TRANS ".shared.b16 {%0, %1}, [%2];"                                      \
                     : "=r"(r[0]), "=r"(r[1])                                                                                 \
                     : "r"(address)                                                                                           \
                     : "memory");                                                                                             \
    }                                                                                                                         \
    __device__ __forceinline__ void ldmatrix_x4##NAME(uint32_t (&r)[4], uint32_t address) {                                   \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" TRANS ".shared.b16 {%0, %1, %2, %3}, [%4];"                              \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                                         \
                     : "r"(address)                                                                                           \
                     : "memory");                                                                                             \
    }
LINATTN_LDMATRIX(, "")
LINATTN_LDMATRIX(_trans, ".trans")
#undef LINATTN_LDMATRIX

// 9.7.14.5 stmatrix: the inverse of ldmatrix, same lanes and fragments. Generic proxy: wgmma and TMA see it only after
// fence_proxy_async_shared_cta() and a barrier.
#define LINATTN_STMATRIX(NAME, TRANS)                                                                                         \
    __device__ __forceinline__ void stmatrix_x1##NAME(uint32_t address, const uint32_t (&r)[1]) {                             \
        asm volatile("stmatrix.sync.aligned.m8n8.x1" TRANS ".shared.b16 [%0], {%1};" ::"r"(address), "r"(r[0]) : "memory");   \
    }                                                                                                                         \
    __device__ __forceinline__ void stmatrix_x2##NAME(uint32_t address, const uint32_t (&r)[2]) {                             \
        asm volatile("stmatrix.sync.aligned.m8n8.x2" TRANS ".shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]), "r"(r[1]) \
                     : "memory");                                                                                             \
    }                                                                                                                         \
    __device__ __forceinline__ void stmatrix_x4##NAME(uint32_t address, const uint32_t (&r)[4]) {                             \
        asm volatile("stmatrix.sync.aligned.m8n8.x4" TRANS ".shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),   \
                     "r"(r[1]), "r"(r[2]), "r"(r[3])                                                                          \
                     : "memory");                                                                                             \
    }
LINATTN_STMATRIX(, "")
LINATTN_STMATRIX(_trans, ".trans")
#undef LINATTN_STMATRIX

// 9.7.14.5 movmatrix: transposes an 8x8 fragment, (g, 2q..2q+1) to (2q..2q+1, g), without shared memory.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t a) {
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

}  // namespace linattn::ptx
