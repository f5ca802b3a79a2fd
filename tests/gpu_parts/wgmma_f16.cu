// The wgmma part for f16 inputs.
#include "wgmma_case.cuh"

PARTS_API int parts_wgmma_f16(const uint16_t *a, const uint16_t *b, const float *c, float *d, int n, int register_a,
                              int major_a, int major_b, int swizzle_a, int swizzle_b, int n0, int accumulate, int first) {
    return parts::guarded([&] {
        const parts::WgmmaCase p = {
            a, b, c, d, static_cast<parts::Swizzle>(swizzle_a), static_cast<parts::Swizzle>(swizzle_b), n0, accumulate != 0};
        parts::run_wgmma<__half>(p, n, register_a != 0, static_cast<parts::Major>(major_a), static_cast<parts::Major>(major_b),
                                 first != 0);
    });
}
