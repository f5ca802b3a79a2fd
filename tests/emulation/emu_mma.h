// Matrices of a warp: ldmatrix, stmatrix, movmatrix and mma.sync. Part of emu.h.
#pragma once
#include "emu_core.h"
namespace linattn::ptx {
using namespace emu;
inline void matrix_load(uint32_t *r, uint32_t a, bool trans, int n) {
    wbuf[W()][L()] = a;
    warp();
    for (int m = 0; m < n; m++) {
        uint16_t e[2];
        for (int i = 0; i < 2; i++) {
            int row = trans ? 2 * (L() % 4) + i : L() / 4, col = trans ? L() / 4 : 2 * (L() % 4) + i;
            uint32_t base = (uint32_t)wbuf[W()][8 * m + row];
            if (base % 16) abort();
            memcpy(&e[i], at(base + 2 * col), 2);
        }
        r[m] = e[0] | (uint32_t)e[1] << 16;
    }
    warp();
}
inline void matrix_store(uint32_t a, const uint32_t *r, bool trans, int n) {
    wbuf[W()][L()] = a;
    warp();
    for (int m = 0; m < n; m++)
        for (int i = 0; i < 2; i++) {
            int row = trans ? 2 * (L() % 4) + i : L() / 4, col = trans ? L() / 4 : 2 * (L() % 4) + i;
            uint32_t base = (uint32_t)wbuf[W()][8 * m + row];
            if (base % 16) abort();
            uint16_t e = (uint16_t)(r[m] >> (16 * i));
            memcpy(at(base + 2 * col), &e, 2);
        }
    warp();
}
inline void ldmatrix_x2(uint32_t (&r)[2], uint32_t a) { matrix_load(r, a, false, 2); }
inline void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t a) { matrix_load(r, a, true, 2); }
inline void stmatrix_x2_trans(uint32_t a, const uint32_t (&r)[2]) { matrix_store(a, r, true, 2); }
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t a) { matrix_load(r, a, false, 4); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t a) { matrix_load(r, a, true, 4); }
inline void stmatrix_x4(uint32_t a, const uint32_t (&r)[4]) { matrix_store(a, r, false, 4); }
inline void stmatrix_x4_trans(uint32_t a, const uint32_t (&r)[4]) { matrix_store(a, r, true, 4); }
inline uint32_t movmatrix_trans(uint32_t a) {
    wbuf[W()][L()] = a;
    warp();
    uint32_t r = 0;
    for (int i = 0; i < 2; i++) {
        int row = 2 * (L() % 4) + i, col = L() / 4;
        r |= ((uint32_t)(wbuf[W()][row * 4 + col / 2] >> (16 * (col % 2))) & 0xffff) << (16 * i);
    }
    warp();
    return r;
}
inline uint32_t mbuf[32][32][8];
template <class T>
void mma_(float (&d)[4], const uint32_t *a, int na, const uint32_t *b, int nb) {
    for (int i = 0; i < na; i++) mbuf[W()][L()][i] = a[i];
    for (int i = 0; i < nb; i++) mbuf[W()][L()][4 + i] = b[i];
    warp();
    int K = 8 * nb;
    for (int e = 0; e < 4; e++) {
        int r = L() / 4 + 8 * (e / 2), c = 2 * (L() % 4) + e % 2;
        float s = 0;
        for (int k = 0; k < K; k++) {
            uint32_t x = mbuf[W()][(r % 8) * 4 + (k % 8) / 2][(r / 8) + 2 * (k / 8)],
                     y = mbuf[W()][c * 4 + (k % 8) / 2][4 + k / 8];
            s += up<T>(x >> (16 * (k % 2))) * up<T>(y >> (16 * (k % 2)));
        }
        d[e] += s;
    }
    warp();
}
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    uint32_t b[2] = {b0, b1};
    mma_<T>(d, a, 4, b, 2);
}
template <class T>
void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
    mma_<T>(d, a, 2, &b, 1);
}
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const auto value = [](uint32_t x) { return __uint_as_float(x & 0xffffe000u); };
    uint32_t *mine = mbuf[W()][L()];
    for (int i = 0; i < 4; i++) mine[i] = a[i];
    mine[4] = b0, mine[5] = b1;
    warp();
    for (int e = 0; e < 4; e++) {
        const int r = L() / 4, c = 2 * (L() % 4) + e % 2;
        float s = 0;
        for (int k = 0; k < 8; k++)
            s += value(mbuf[W()][4 * r + k % 4][e / 2 + 2 * (k / 4)]) * value(mbuf[W()][4 * c + k % 4][4 + k / 4]);
        d[e] += s;
    }
    warp();
}
}  // namespace linattn::ptx
