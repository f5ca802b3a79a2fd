/* Gated delta rule from C99, checked against the plain loop.
 *   cc -std=c99 c_example.c $(pkg-config --cflags --libs pylinattn) -lm */
#include <linattn.h>
#include <math.h>
#include <stdio.h>

enum { T = 5, K = 3, V = 2 };

static linattn_tensor tensor(void *data, int ndim, int64_t d2, int64_t d3) { /* [1,T,d2,d3], row-major */
    linattn_tensor t = {data, {1, T, d2, d3}, {T * d2 * d3, d2 * d3, d3, 1}, ndim, LINATTN_F64, LINATTN_CPU, 0, 0, 0};
    return t;
}

int main(void) {
    double q[T][K], k[T][K], v[T][V], g[T], beta[T], o[T][V], S[K][V] = {{0}}, worst = 0;
    for (int t = 0; t < T; ++t) {
        for (int i = 0; i < K; ++i) q[t][i] = sin(t + 2 * i), k[t][i] = 0.5 * cos(3 * t + i);
        for (int j = 0; j < V; ++j) v[t][j] = sin(5 * t + j);
        g[t] = -0.1 * t, beta[t] = 0.5;
    }
    linattn_gdn_fwd_args args = {.size = sizeof args, .scale = 1}; /* what is left zero is not given */
    args.q = tensor(q, 4, 1, K), args.k = tensor(k, 4, 1, K), args.v = tensor(v, 4, 1, V);
    args.g = tensor(g, 3, 1, 1), args.beta = tensor(beta, 3, 1, 1), args.o = tensor(o, 4, 1, V);
    if (linattn_gdn_fwd(&args) != LINATTN_OK) return fprintf(stderr, "%s\n", linattn_last_error()), 1;
    for (int t = 0; t < T; ++t)
        for (int j = 0; j < V; ++j) { /* S = exp(g) S;  u = beta (v - S'k);  S = S + k u';  o = S'q */
            double u = v[t][j], expected = 0;
            for (int i = 0; i < K; ++i) u -= (S[i][j] *= exp(g[t])) * k[t][i];
            for (int i = 0; i < K; ++i) expected += (S[i][j] += k[t][i] * beta[t] * u) * q[t][i];
            worst = fmax(worst, fabs(o[t][j] - expected));
            printf("o[%d][%d] = % .6f\n", t, j, o[t][j]);
        }
    printf("%s, largest error %.1e\n", linattn_last_path(), worst);
    return worst > 1e-12;
}
