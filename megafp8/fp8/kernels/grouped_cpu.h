/* Moments in FP8 by groups of 128 elements with range expansion: the rule, and the bits, of
 * fp8/grouped.py. A group keeps its largest magnitude and its power in `groups`. */
#define GROUP 128

INLINE float log2_fraction(uint32_t bits) {
    float z = as_float((bits & 0x7fffffu) | 0x3f800000u) - 1.0f;
    float sum = -0x1.310a96p-7f;
    sum = sum * z + 0x1.aa774ep-5f;
    sum = sum * z + -0x1.19a4aap-3f;
    sum = sum * z + 0x1.ef56b2p-3f;
    sum = sum * z + -0x1.63a2e0p-2f;
    sum = sum * z + 0x1.ea2c0ep-2f;
    sum = sum * z + -0x1.713ca4p-1f;
    sum = sum * z + 0x1.715420p+0f;
    return sum * z;
}

/* log2(x / y) of normal numbers above 0, given as bits. */
INLINE float log2_ratio(uint32_t x, uint32_t y) {
    float exponents = (float)((int32_t)(x >> 23) - (int32_t)(y >> 23));
    return exponents + (log2_fraction(x) - log2_fraction(y));
}

/* top * 2^t for t at most 0. */
INLINE float times_exp2(float top, float t) {
    t = t < -252.0f ? -252.0f : t;
    t = t > 0.0f ? 0.0f : t;
    int32_t whole = (int32_t)t; /* towards 0 */
    whole -= (float)whole > t;
    float w = t - (float)whole;
    float sum = 0x1.ee382ep-10f;
    sum = sum * w + 0x1.260a28p-7f;
    sum = sum * w + 0x1.c9686ep-5f;
    sum = sum * w + 0x1.ebd53cp-3f;
    sum = sum * w + 0x1.62e4e2p-1f;
    float power = sum * w + 1.0f;
    int32_t first = whole > -126 ? whole : -126;
    float one = as_float((uint32_t)(first + 127) << 23);
    float other = as_float((uint32_t)(whole - first + 127) << 23);
    return top * one * other * power;
}

INLINE float *group_of(const struct stored *x, size_t begin) {
    size_t of_row = (x->cols + GROUP - 1) / GROUP;
    return x->groups + 2 * (begin / x->cols * of_row + begin % x->cols / GROUP);
}

INLINE void load_group(const uint8_t *restrict data, const float *group, size_t n, int kind,
                       float *restrict out) {
    const float top = group[0], inverse = 1.0f / group[1];
    const float max = kind == S_E4M3 ? 448.0f : 57344.0f;
    const int format = kind == S_E4M3 ? E4M3 : E5M2;
    const int is_bad = (as_bits(top) & 0x7fffffffu) >= 0x7f800000u;
#pragma GCC ivdep
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)decode_one(data[i], format) << 16, sign = bits & 0x80000000u;
        int32_t magnitude = (int32_t)(bits ^ sign);
        uint32_t number = magnitude ? (uint32_t)magnitude : 0x3f800000u;
        uint32_t value = as_bits(times_exp2(top, log2_ratio(number, as_bits(max)) * inverse));
        value = magnitude ? value : 0;
        out[i] = as_float((magnitude >= 0x7f800000) | is_bad ? 0x7fc00000u : value | sign);
    }
}

INLINE void store_group(uint8_t *restrict data, size_t begin, float *group, size_t n, int kind,
                        int stochastic, uint64_t key, const float *restrict in) {
    const float max = kind == S_E4M3 ? 448.0f : 57344.0f;
    const float range = kind == S_E4M3 ? 0x1.09d5dap+8f : 0x1.e9d5dap+8f;
    int32_t top = 0, low = 0x7fffffff;
    for (size_t i = 0; i < n; i++) {
        int32_t magnitude = (int32_t)(as_bits(in[i]) & 0x7fffffffu);
        int32_t nonzero = magnitude < 0x00800000 ? 0x7fffffff : magnitude;
        top = magnitude > top ? magnitude : top;
        low = nonzero < low ? nonzero : low;
    }
    const int is_bad = top >= 0x7f800000, is_used = !is_bad & (top >= 0x00800000);
    float power = 1.0f;
    if (is_used) {
        power = floorf(range / log2_ratio((uint32_t)top, (uint32_t)low));
        power = power < 256.0f ? power : 256.0f;
        power = (power > 1.0f ? power : 1.0f) * 0.0625f;
    }
    group[0] = is_bad ? as_float(0x7fc00000u) : is_used ? as_float((uint32_t)top) : 0.0f;
    group[1] = power;
    const uint32_t base = is_used ? (uint32_t)top : 0x3f800000u;
#pragma GCC ivdep
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = as_bits(in[i]), sign = bits & 0x80000000u;
        int32_t magnitude = (int32_t)(bits ^ sign), is_zero = magnitude < 0x00800000;
        uint32_t safe = is_zero | is_bad ? 0x3f800000u : (uint32_t)magnitude;
        uint32_t number = as_bits(times_exp2(max, log2_ratio(safe, base) * power)) | sign;
        number = is_zero ? 0 : number;
        number = is_bad ? 0x7fc00000u : number;
        uint32_t random = stochastic ? random_bits(key, begin + i) : 0;
        data[i] = (uint8_t)code_of(as_float(number), 1.0f, kind, stochastic, random);
    }
}

static void load_grouped(const struct stored *x, size_t begin, size_t n, float *out) {
    const uint8_t *data = (const uint8_t *)x->data + begin;
    if (x->kind == S_E4M3) load_group(data, group_of(x, begin), n, S_E4M3, out);
    else load_group(data, group_of(x, begin), n, S_E5M2, out);
}

static void store_grouped(const struct stored *x, size_t begin, size_t n, const float *in) {
    uint8_t *data = (uint8_t *)x->data + begin;
    float *group = group_of(x, begin);
#define STORE(K, S) store_group(data, begin, group, n, K, S, x->key, in)
    if (x->kind == S_E4M3) x->stochastic ? STORE(S_E4M3, 1) : STORE(S_E4M3, 0);
    else x->stochastic ? STORE(S_E5M2, 1) : STORE(S_E5M2, 0);
#undef STORE
}
