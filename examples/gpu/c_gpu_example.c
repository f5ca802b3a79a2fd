/* Gated delta rule on a GPU from C99, on a stream of our own, against the same call on the CPU.
 *   cc -std=c99 c_gpu_example.c $(pkg-config --cflags --libs pylinattn) -I$CUDA_HOME/include -L$CUDA_HOME/lib64 -lcudart -lm */
#include <cuda_runtime_api.h>
#include <linattn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { T = 100, H = 2, D = 64 };

static linattn_tensor tensor(void *data, int ndim, int64_t d3, int dtype, int device) { /* [1,T,H] or [1,T,H,D], row-major */
    linattn_tensor t = {data, {1, T, H, d3}, {T * H * d3, H * d3, d3, 1}, ndim, dtype, device, 0, 0, 0};
    return t;
}

static void must(int good, const char *what) {
    if (!good) fprintf(stderr, "%s: %s\n", what, linattn_last_error()), exit(1);
}

static uint16_t bf16(float x) { /* rounded towards zero */
    union {
        float x;
        uint32_t bits;
    } u = {x};
    return (uint16_t)(u.bits >> 16);
}

int main(void) {
    static uint16_t host[4][T * H * D]; /* q, k, v, o */
    static float gates[2][T * H];       /* g, beta */
    for (int i = 0; i < T * H * D; ++i)
        host[0][i] = bf16(0.125f * sinf(i)), host[1][i] = bf16(0.125f * cosf(3 * i)), host[2][i] = bf16(sinf(5 * i));
    for (int i = 0; i < T * H; ++i) gates[0][i] = -0.05f * (i % 7), gates[1][i] = 0.5f;

    char *device;
    cudaStream_t stream;
    const size_t half = sizeof host[0], single = sizeof gates[0];
    must(!cudaMalloc((void **)&device, 4 * half + 2 * single) && !cudaStreamCreate(&stream), "no GPU memory");
    cudaMemcpyAsync(device, host, 3 * half, cudaMemcpyHostToDevice, stream);
    cudaMemcpyAsync(device + 4 * half, gates, 2 * single, cudaMemcpyHostToDevice, stream);

    static uint16_t from_gpu[T * H * D];
    for (int gpu = 1; gpu >= 0; --gpu) {
        char *base = gpu ? device : (char *)host, *g = gpu ? device + 4 * half : (char *)gates;
        const int where = gpu ? LINATTN_CUDA : LINATTN_CPU;
        linattn_gdn_fwd_args args = {.size = sizeof args, .scale = 0.125, .stream = gpu ? stream : NULL};
        args.q = tensor(base, 4, D, LINATTN_BF16, where), args.k = tensor(base + half, 4, D, LINATTN_BF16, where);
        args.v = tensor(base + 2 * half, 4, D, LINATTN_BF16, where),
        args.o = tensor(base + 3 * half, 4, D, LINATTN_BF16, where);
        args.g = tensor(g, 3, 1, LINATTN_F32, where), args.beta = tensor(g + single, 3, 1, LINATTN_F32, where);
        uint64_t bytes = 0;
        must(linattn_gdn_fwd_workspace(&args, &bytes) == LINATTN_OK, "workspace");
        if (bytes) {
            args.workspace = tensor(NULL, 1, 1, LINATTN_U8, where);
            args.workspace.shape[0] = (int64_t)bytes, args.workspace.strides[0] = 1;
            must(gpu && !cudaMalloc(&args.workspace.data, bytes), "no memory for the workspace");
        }
        must(linattn_gdn_fwd(&args) == LINATTN_OK, "gdn_fwd");
        printf("%s\n", linattn_last_path());
        if (gpu) cudaMemcpyAsync(from_gpu, device + 3 * half, half, cudaMemcpyDeviceToHost, stream);
    }
    must(!cudaStreamSynchronize(stream), "CUDA failed");
    double error = 0, size = 0;
    for (int i = 0; i < T * H * D; ++i) {
        union {
            uint32_t bits;
            float x;
        } a = {(uint32_t)from_gpu[i] << 16}, b = {(uint32_t)host[3][i] << 16};
        error += (a.x - b.x) * (a.x - b.x), size += b.x * b.x;
    }
    printf("relative error between GPU and CPU %.1e\n", sqrt(error / size));
    return !(error <= 25e-6 * size);
}
