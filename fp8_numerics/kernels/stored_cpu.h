/* Tensors stored in low precision: their types, and blocks of them as FP32 and back.
 *
 * The value of a stored element is number * dequant_scale. A tensor is read and written in blocks
 * that lie in the first-level cache as FP32, one vectorized loop for each number format.
 */
#ifndef MEGAFP8_STORED_CPU_H
#define MEGAFP8_STORED_CPU_H

#include "elements_cpu.h"

#include <math.h>
#ifdef __F16C__ /* AVX-512 has it too */
#include <immintrin.h>
#endif

enum { S_F32 = 0, S_BF16 = 1, S_F16 = 2, S_E4M3 = 3, S_E5M2 = 4 };
#define BLOCK 512

/* One stored tensor. `dequant_scale` is read, and written where `writes` is set; `key` seeds
 * stochastic rounding, which `stochastic` switches on. */
struct stored {
    void *data;
    float *dequant_scale;
    uint64_t key;
    int32_t kind, stochastic;
};

struct adam {
    struct stored param, exp_avg, exp_avg_sq, grad;
    size_t n;
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float inverse_root; /* 1 / sqrt(1 - beta2^t) */
    float eps, step_size, decay; /* AdamW: the weight's factor; Adam: the gradient's share of it */
    int32_t is_l2, threads;
    void *backup; /* see backup_of */
};

/* 32 random bits of a key and an element's index: two rounds of MurmurHash3's finalizer. */
INLINE uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    return x ^ (x >> 16);
}

INLINE uint32_t random_bits(uint64_t key, uint64_t index) {
    uint32_t first = mix((uint32_t)index ^ (uint32_t)key);
    return mix(first ^ (uint32_t)(key >> 32) ^ (uint32_t)(index >> 32));
}

/* |y| <= max to a code of a format with `mb` mantissa bits and the smallest exponent `low` (biased
 * as FP32's, e.g. 127 - 6): to nearest, ties to even, or up with the probability of the distance. */
INLINE uint32_t magnitude_code(float y, int mb, int low, int stochastic, uint32_t random) {
    int32_t emin = low << 23, e = (int32_t)(as_bits(y) & 0x7f800000u);
    e = e > emin ? e : emin;
    uint32_t k;
    if (stochastic) {
        float steps = y * as_float(((uint32_t)(254 + mb) << 23) - (uint32_t)e); /* exact */
        int32_t whole = (int32_t)steps;
        float up = (float)(int32_t)(random >> 8) * 0x1p-24f;
        k = (uint32_t)(whole + (up < steps - (float)whole));
    } else {
        float m = as_float((uint32_t)e + (((uint32_t)(23 - mb) << 23) | 0x400000u));
        k = as_bits(y + m) - as_bits(m);
    }
    return ((uint32_t)(e - emin) >> (23 - mb)) + k;
}

INLINE uint32_t code_of(float x, float scale, int kind, int stochastic, uint32_t random) {
    uint32_t bits = as_bits(x * scale), sign = bits & 0x80000000u;
    int32_t magnitude = (int32_t)(bits ^ sign), is_nan = magnitude > 0x7f800000;
    if (kind == S_BF16) {
        uint32_t m = (uint32_t)magnitude, up;
        if (stochastic) {
            m = magnitude > 0x7f7f0000 ? 0x7f7f0000u : m;
            up = (random >> 16) < (m & 0xffffu);
        } else up = ((m & 0xffffu) + ((m >> 16) & 1)) > 0x8000u;
        return is_nan ? 0x7fc0u : ((m >> 16) + up) | (sign >> 16);
    }
    const float max = kind == S_F16 ? 65504.0f : kind == S_E4M3 ? 448.0f : 57344.0f;
    const int mb = kind == S_F16 ? 10 : kind == S_E4M3 ? 3 : 2;
    const int low = kind == S_E4M3 ? 127 - 6 : 127 - 14;
    float y = as_float((uint32_t)magnitude);
    y = y < max ? y : max;
    uint32_t code = magnitude_code(y, mb, low, stochastic, random);
    if (kind == S_F16) return (is_nan ? 0x7e00u : code) | (sign >> 16);
    return (is_nan ? 0x7fu : code) | (sign >> 24);
}

INLINE void load_span(const void *restrict data, size_t begin, size_t n, int kind, float scale,
                      float *restrict out) {
#pragma GCC ivdep
    for (size_t i = 0; i < n; i++) {
        if (kind == S_F32) out[i] = ((const float *)data)[begin + i];
        else if (kind == S_BF16)
            out[i] = as_float((uint32_t)((const uint16_t *)data)[begin + i] << 16);
        else if (kind == S_F16)
            out[i] = half_to_float(((const uint16_t *)data)[begin + i]) * scale;
        else {
            uint8_t code = ((const uint8_t *)data)[begin + i];
            int format = kind == S_E4M3 ? E4M3 : E5M2;
            out[i] = as_float((uint32_t)decode_one(code, format) << 16) * scale;
        }
    }
}

/* FP16 by the instructions of most x86 CPUs: the same bits, several times faster. */
#ifdef __F16C__
INLINE void load_f16(const uint16_t *data, size_t n, float scale, float *out) {
    const __m256 factor = _mm256_set1_ps(scale);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(data + i)));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(x, factor));
    }
    load_span(data, i, n - i, S_F16, scale, out + i);
}
#else
#define load_f16(data, n, scale, out) load_span(data, 0, n, S_F16, scale, out)
#endif

static void load_block(const struct stored *x, size_t begin, size_t n, float scale, float *out) {
    if (x->kind == S_F32) load_span(x->data, begin, n, S_F32, scale, out);
    else if (x->kind == S_BF16) load_span(x->data, begin, n, S_BF16, scale, out);
    else if (x->kind == S_F16) load_f16((const uint16_t *)x->data + begin, n, scale, out);
    else if (x->kind == S_E4M3) load_span(x->data, begin, n, S_E4M3, scale, out);
    else load_span(x->data, begin, n, S_E5M2, scale, out);
}

INLINE void store_span(void *restrict data, size_t begin, size_t n, int kind, int stochastic,
                       uint64_t key, float scale, const float *restrict in) {
#pragma GCC ivdep
    for (size_t i = 0; i < n; i++) {
        uint32_t random = stochastic ? random_bits(key, begin + i) : 0;
        if (kind == S_F32) ((float *)data)[begin + i] = in[i];
        else if (kind == S_BF16 || kind == S_F16)
            ((uint16_t *)data)[begin + i] =
                (uint16_t)code_of(in[i], scale, kind, stochastic, random);
        else ((uint8_t *)data)[begin + i] = (uint8_t)code_of(in[i], scale, kind, stochastic, random);
    }
}

#ifdef __F16C__
INLINE void store_f16(uint16_t *data, size_t n, float scale, const float *in) {
    const __m256 factor = _mm256_set1_ps(scale);
    const __m256 high = _mm256_set1_ps(65504.0f), low = _mm256_set1_ps(-65504.0f);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) { /* of a NaN min and max return their second operand */
        __m256 x = _mm256_mul_ps(_mm256_loadu_ps(in + i), factor);
        x = _mm256_max_ps(low, _mm256_min_ps(high, x));
        _mm_storeu_si128((__m128i *)(data + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    store_span(data, i, n - i, S_F16, 0, 0, scale, in + i);
}
#else
#define store_f16(data, n, scale, in) store_span(data, 0, n, S_F16, 0, 0, scale, in)
#endif

static void store_block(const struct stored *x, size_t begin, size_t n, float scale,
                        const float *in) {
#define STORE(K, S) store_span(x->data, begin, n, K, S, x->key, scale, in)
#define EITHER(K) (x->stochastic ? STORE(K, 1) : STORE(K, 0))
    if (x->kind == S_F32) STORE(S_F32, 0);
    else if (x->kind == S_BF16) EITHER(S_BF16);
    else if (x->kind == S_F16 && !x->stochastic)
        store_f16((uint16_t *)x->data + begin, n, scale, in);
    else if (x->kind == S_F16) STORE(S_F16, 1);
    else if (x->kind == S_E4M3) EITHER(S_E4M3);
    else EITHER(S_E5M2);
#undef EITHER
#undef STORE
}

INLINE int32_t amax_bits(const float *x, size_t n, int32_t amax) {
    for (size_t i = 0; i < n; i++) {
        int32_t magnitude = (int32_t)(as_bits(x[i]) & 0x7fffffffu);
        amax = magnitude > amax ? magnitude : amax;
    }
    return amax;
}

INLINE int has_scale(const struct stored *x) { return x->kind >= S_F16; }

/* The largest power of two not above max / amax, at most 2^126, so that its inverse is a normal
 * number. An amax that is not finite leaves NaN as the scale to come back, so that all values are
 * NaN: nothing saturates unseen. */
static float new_scale(const struct stored *x, int32_t amax) {
    if (!has_scale(x)) return 1.0f;
    if (amax >= 0x7f800000) {
        *x->dequant_scale = as_float(0x7fc00000u);
        return 1.0f;
    }
    float max = x->kind == S_F16 ? 65504.0f : x->kind == S_E4M3 ? 448.0f : 57344.0f;
    uint32_t bits = 127u << 23;
    if (amax) {
        bits = as_bits(max / as_float((uint32_t)amax)) & 0x7f800000u;
        bits = bits > (253u << 23) ? 253u << 23 : bits;
    }
    *x->dequant_scale = as_float((254u << 23) - bits);
    return as_float(bits);
}

/* `fresh`: the moments in m and v are those of this step already. */
INLINE void update(float *restrict p, float *restrict m, float *restrict v,
                   const float *restrict g, size_t n, const struct adam *a, int is_l2,
                   int fresh_m, int fresh_v) {
#pragma GCC ivdep
    for (size_t i = 0; i < n; i++) {
        float param = is_l2 ? p[i] : p[i] * a->decay;
        float grad = is_l2 ? g[i] + a->decay * p[i] : g[i];
        m[i] = fresh_m ? m[i] : m[i] * a->beta1 + grad * a->one_minus_beta1;
        v[i] = fresh_v ? v[i] : v[i] * a->beta2 + (grad * grad) * a->one_minus_beta2;
        float divisor = sqrtf(v[i]) * a->inverse_root + a->eps;
        p[i] = param - (m[i] / divisor) * a->step_size;
    }
}

struct block { float p[BLOCK], m[BLOCK], v[BLOCK], g[BLOCK]; };

static void update_block(struct block *b, const struct adam *a, size_t n, int fresh) {
#define UPDATE(L2, M, V) update(b->p, b->m, b->v, b->g, n, a, L2, M, V)
#define OF(L2) \
    (fresh == 0 ? UPDATE(L2, 0, 0) : fresh == 1 ? UPDATE(L2, 1, 0) \
     : fresh == 2 ? UPDATE(L2, 0, 1) : UPDATE(L2, 1, 1))
    if (a->is_l2) OF(1);
    else OF(0);
#undef OF
#undef UPDATE
}

static size_t width(const struct stored *x) {
    return x->kind == S_F32 ? 4 : x->kind == S_BF16 || x->kind == S_F16 ? 2 : 1;
}

/* The backup holds the parameter's and the moments' bytes from before the step, those of each from a
 * multiple of 16 on, as numbers of two bytes may follow an odd number of bytes. Those of FP32 moments
 * are not needed, as what is written in FP32 is the fresh moment itself. */
static int is_backed_up(const struct adam *a, const struct stored *x) {
    int has_scales = has_scale(&a->param) || has_scale(&a->exp_avg) || has_scale(&a->exp_avg_sq);
    return has_scales && (x == &a->param || x->kind != S_F32);
}

struct backup { struct stored of[3]; };

static struct backup backup_of(const struct adam *a, const struct stored *const *all) {
    struct backup kept;
    char *at = a->backup;
    for (int k = 0; k < 3; k++) {
        kept.of[k] = *all[k];
        if (!is_backed_up(a, all[k])) continue;
        kept.of[k].data = at;
        at += (a->n * width(all[k]) + 15) / 16 * 16;
    }
    return kept;
}

static void keep_block(const struct stored *kept, const struct stored *x, size_t begin, size_t n) {
    size_t size = width(x);
    memcpy((char *)kept->data + begin * size, (const char *)x->data + begin * size, n * size);
}

#endif
