/* The GELU in its tanh form, x / (1 + 2^-u) with u = 2 sqrt(2/pi) log2(e) (x + 0.044715 x^3), and
 * its gradient.
 *
 * 2^-|u|, which cannot overflow, is a polynomial in r, |r| <= 1/2, times a power of two; below
 * 2^-126 it is 0. Each step is one rounding of IEEE 754, and gelu.py has the same steps in torch.
 */
#ifndef MEGAFP8_GELU_CPU_H
#define MEGAFP8_GELU_CPU_H

#include "elements_cpu.h"

/* The sigmoid of t = u ln(2), and in `slope` its derivative. */
INLINE float gate_of(float x, float *slope) {
    float u = x * (2.30220819813f + 0.102943239f * (x * x)), a = u < 0.0f ? u : -u;
    float shifted = a + 0x1.8p23f, r = a - (shifted - 0x1.8p23f); /* a rounded; what is left */
    float p = 0.001326472731307149f * r + 0.009671512991189957f;
    p = p * r + 0.05550733581185341f;
    p = p * r + 0.24022242426872253f;
    p = p * r + 0.6931470036506653f;
    p = p * r + 1.0f;
    float power = as_float(as_bits(p) + (as_bits(shifted) << 23));
    power = a < -126.0f ? 0.0f : power;
    float larger = 1.0f / (1.0f + power), smaller = power * larger;
    *slope = smaller * larger;
    return u < 0.0f ? smaller : larger;
}

INLINE void gelu_span(const void *restrict grad, const void *restrict x, size_t begin, size_t end,
                      void *restrict out, int kind) {
#pragma GCC ivdep
    for (size_t i = begin; i < end; i++) {
        float v = load(x, i, kind), slope, gate = gate_of(v, &slope), y = v * gate;
        if (grad) {
            slope = (v * slope) * (1.59576912161f + 0.21406445f * (v * v));
            y = load(grad, i, kind) * (gate + slope);
        }
        if (kind == F32) ((float *)out)[i] = y;
        else ((uint16_t *)out)[i] = to_bf16(y);
    }
}

/* out = gelu(x), or grad * gelu'(x) if there is a gradient; all in FP32 or all in BF16. */
void megafp8_gelu(const void *grad, const void *x, size_t n, int kind, void *out, int threads) {
    if (n < SERIAL_BELOW / 16) threads = 1; /* an element takes longer than one of a cast */
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(n, threads, t, &begin, &end);
        if (kind == F32 && grad) gelu_span(grad, x, begin, end, out, F32);
        else if (kind == F32) gelu_span(NULL, x, begin, end, out, F32);
        else if (grad) gelu_span(grad, x, begin, end, out, BF16);
        else gelu_span(NULL, x, begin, end, out, BF16);
    }
}

#endif
