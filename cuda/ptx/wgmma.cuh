// wgmma: asynchronous m64nNk16 products of one warpgroup (4 consecutive warps, the first a multiple of 4), fp32 accumulators in
// registers, B in shared memory, A in shared memory (SS) or registers (RS). sm_90a only. PTX ISA 9.7.15.
//
// Accumulator: warp w of the warpgroup holds rows 16w..16w+15; d[4j+0..1] = (g, 8j+2q..2q+1), d[4j+2..3] = (g+8, 8j+2q..).
// A fragment in registers: a[0..3] as in mma.cuh, per warp. Two neighbouring column groups of an accumulator therefore pack
// into the A fragment of one k-step: a[i] = pack(d[8s+2i], d[8s+2i+1]).
//
// The order for every chain: registers and shared memory ready; fence_proxy_async_shared_cta() by generic writers and a
// barrier; wgmma_fence(); products; wgmma_commit_group(); wgmma_wait_group<n>(); register_fence() on accumulators and A
// registers before they are read or overwritten. What makes ptxas serialise (warnings C7510-C7519, to be treated as errors):
// too few registers, a group left pending over a loop's back edge, products on parts of one accumulator array, calls between
// issue and wait.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace linattn::ptx {

// Bits 62-63 of the descriptor. The 16-byte units of a row are XORed with the row number inside a repeat of 8 rows; see
// swizzle.cuh.
enum class Swizzle : uint32_t { None = 0, B128 = 1, B64 = 2, B32 = 3 };

// How a shared operand lies: K contiguous (K-major, the instruction's "not transposed") or M/N contiguous.
enum class Major : int { K = 0, MN = 1 };

// 9.7.15.5.1.2 matrix descriptor, in two halves so that k-steps add to the low one: low + (bytes >> 4).
//   low:  start address >> 4, leading byte offset >> 4 in bits 16-29.  high: stride byte offset >> 4, swizzle in bits 30-31.
// Offsets, with W the swizzle width (None: 16 bytes):
//   K-major:  stride = from 8 rows of M/N to the next 8; leading = None only, from one 16-byte column of K to the next.
//   MN-major: W > 16: stride = from 8 rows of K to the next 8, leading = from W bytes of M/N to the next W bytes.
//             None:   stride = from 8 columns of M/N to the next 8, leading = from 8 rows of K to the next 8.
// The start may lie inside a repeat along the row (k-steps of 32 bytes; M/N steps), not at a row that is no multiple of 8: the
// base-offset field is left zero, so repeats (8 W bytes) are aligned to their size.
constexpr __host__ __device__ __forceinline__ uint32_t wgmma_descriptor_low(uint32_t address, uint32_t leading_bytes) {
    return ((address & 0x3ffffu) >> 4) | ((leading_bytes & 0x3ffffu) >> 4) << 16;
}

constexpr __host__ __device__ __forceinline__ uint32_t wgmma_descriptor_high(uint32_t stride_bytes, Swizzle swizzle) {
    return ((stride_bytes & 0x3ffffu) >> 4) | static_cast<uint32_t>(swizzle) << 30;
}

__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t low, uint32_t high) {
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(high));
    return descriptor;
}

// 9.7.15.7.1 wgmma.fence: orders register accesses and earlier wgmma against the following ones. Needed before the first
// product and whenever other instructions wrote accumulators or A registers. Not a proxy fence, not a barrier, waits for no
// product.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// 9.7.15.7.2 wgmma.commit_group.
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// 9.7.15.7.3 wgmma.wait_group: until at most kPending groups of this warp are unfinished. Says nothing of the other warps: a
// shared operand may be overwritten only after a barrier (or mbarrier arrivals) of all four.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: stops the compiler from moving reads or writes of these registers over the place it stands.
template <int kCount>
__device__ __forceinline__ void register_fence(float (&r)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(r[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void register_fence(uint32_t (&r)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) asm volatile("" : "+r"(r[i])::"memory");
}

// The products of one N; kBf16 chooses bf16 or fp16 inputs. ss, rs: D = A B + (accumulate ? D : 0). ss_first, rs_first: D = A B
// with D write-only, which frees its registers before the product.
template <int kN>
struct WgmmaShape;

#define LINATTN_OP(N, TYPE, D, A, B, P, MAJORS)                                                                            \
    "{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" D "}, " A \
    ", " B ", p, 1, 1, " MAJORS ";}"
#define LINATTN_PRODUCT(N, D, A, B, P, MAJORS, OUT, ...)                                        \
    if constexpr (kBf16)                                                                        \
        asm volatile(LINATTN_OP(N, "bf16", D, A, B, P, MAJORS) : OUT : __VA_ARGS__ : "memory"); \
    else                                                                                        \
        asm volatile(LINATTN_OP(N, "f16", D, A, B, P, MAJORS) : OUT : __VA_ARGS__ : "memory");
#define LINATTN_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// D: the accumulator's operand list; O: its constraints, a macro of "+" or "="; R0..R6: the operand numbers after it.
#define LINATTN_SHAPE(N, D, O, R0, R1, R2, R3, R4, R5, R6)                                                                     \
    template <>                                                                                                                \
    struct WgmmaShape<N> {                                                                                                     \
        template <bool kBf16, Major kA, Major kB>                                                                              \
        static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {                \
            LINATTN_PRODUCT(N, D, R0, R1, R2, R3 ", " R4, O("+", 0), "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kA)),       \
                            "n"(int(kB)))                                                                                      \
        }                                                                                                                      \
        template <bool kBf16, Major kA, Major kB>                                                                              \
        static __device__ __forceinline__ void ss_first(float (&d)[N / 2], uint64_t a, uint64_t b) {                           \
            LINATTN_PRODUCT(N, D, R0, R1, "0", R2 ", " R3, O("=", 0), "l"(a), "l"(b), "n"(int(kA)), "n"(int(kB)))              \
        }                                                                                                                      \
        template <bool kBf16, Major kB>                                                                                        \
        static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {    \
            LINATTN_PRODUCT(N, D, "{" R0 ", " R1 ", " R2 ", " R3 "}", R4, R5, R6, O("+", 0), LINATTN_A, "l"(b),                \
                            "r"(int(accumulate)), "n"(int(kB)))                                                                \
        }                                                                                                                      \
        template <bool kBf16, Major kB>                                                                                        \
        static __device__ __forceinline__ void rs_first(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {               \
            LINATTN_PRODUCT(N, D, "{" R0 ", " R1 ", " R2 ", " R3 "}", R4, "0", R5, O("=", 0), LINATTN_A, "l"(b), "n"(int(kB))) \
        }                                                                                                                      \
    };
#define LINATTN_O8(C, i)                                                                                               \
    C "f"(d[i]), C "f"(d[i + 1]), C "f"(d[i + 2]), C "f"(d[i + 3]), C "f"(d[i + 4]), C "f"(d[i + 5]), C "f"(d[i + 6]), \
        C "f"(d[i + 7])
#define LINATTN_O16(C, i) LINATTN_O8(C, i), LINATTN_O8(C, i + 8)
#define LINATTN_O32(C, i) LINATTN_O16(C, i), LINATTN_O16(C, i + 16)
#define LINATTN_O64(C, i) LINATTN_O32(C, i), LINATTN_O32(C, i + 32)
#define LINATTN_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LINATTN_D16 LINATTN_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LINATTN_D32 LINATTN_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LINATTN_D64                                                                                             \
    LINATTN_D32                                                                                                 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52" \
    ", %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
LINATTN_SHAPE(16, LINATTN_D8, LINATTN_O8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
LINATTN_SHAPE(32, LINATTN_D16, LINATTN_O16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
LINATTN_SHAPE(64, LINATTN_D32, LINATTN_O32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
LINATTN_SHAPE(128, LINATTN_D64, LINATTN_O64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
#undef LINATTN_D64
#undef LINATTN_D32
#undef LINATTN_D16
#undef LINATTN_D8
#undef LINATTN_O64
#undef LINATTN_O32
#undef LINATTN_O16
#undef LINATTN_O8
#undef LINATTN_SHAPE
#undef LINATTN_A
#undef LINATTN_PRODUCT
#undef LINATTN_OP

template <class T>
constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;

// 9.7.15.5.2 wgmma.mma_async, A and B by descriptors: D = A B + (accumulate ? D : 0), D 64 x N with N = 2 kCount. Asynchronous:
// nothing is known of D or of the operands' use until the group is waited for.
template <class T, Major kA, Major kB, int kCount>
__device__ __forceinline__ void wgmma_ss(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate) {
    WgmmaShape<2 * kCount>::template ss<kIsBf16<T>, kA, kB>(d, a, b, accumulate);
}

template <class T, Major kA, Major kB, int kCount>
__device__ __forceinline__ void wgmma_ss_first(float (&d)[kCount], uint64_t a, uint64_t b) {
    WgmmaShape<2 * kCount>::template ss_first<kIsBf16<T>, kA, kB>(d, a, b);
}

// A from registers (always K-major). The registers of a must not be written until the group is waited for.
template <class T, Major kB, int kCount>
__device__ __forceinline__ void wgmma_rs(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    WgmmaShape<2 * kCount>::template rs<kIsBf16<T>, kB>(d, a, b, accumulate);
}

template <class T, Major kB, int kCount>
__device__ __forceinline__ void wgmma_rs_first(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b) {
    WgmmaShape<2 * kCount>::template rs_first<kIsBf16<T>, kB>(d, a, b);
}

}  // namespace linattn::ptx
