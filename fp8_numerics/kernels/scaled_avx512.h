/* Adam's update over stored tensors for CPUs with AVX-512, 16 elements at a time in registers, so that
 * divisions and roots overlap with the conversions. The bits are those of stored_cpu.h's blocks.
 */
#include "elements_avx512.h"
#include "stored_cpu.h"

#if HAS_AVX512
INLINE __m512 load_16(const void *data, size_t i, int kind, __m512 scale) {
    if (kind == S_F32) return _mm512_loadu_ps((const float *)data + i);
    if (kind == S_BF16 || kind == S_F16) {
        __m256i raw = _mm256_loadu_si256((const __m256i *)((const uint16_t *)data + i));
        if (kind == S_F16) return _mm512_mul_ps(_mm512_cvtph_ps(raw), scale);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
    }
    __m128i raw = _mm_loadu_si128((const __m128i *)((const uint8_t *)data + i));
    if (kind == S_E5M2) { /* the upper half of an FP16 number */
        __m512 number = _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(raw), 8));
        return _mm512_mul_ps(number, scale);
    }
    /* E4M3 as FP16 with the same bits behind the sign is 2^-8 of the number */
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(raw), 7);
    __m512 small = _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xbf80)));
    __m512 number = _mm512_mul_ps(small, _mm512_set1_ps(256.0f));
    __m128i all = _mm_set1_epi8(0x7f);
    __mmask16 is_nan = _mm_cmpeq_epi8_mask(_mm_and_si128(raw, all), all);
    number = _mm512_mask_mov_ps(number, is_nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
    return _mm512_mul_ps(number, scale);
}

INLINE void store_16(void *data, size_t i, int kind, __m512 scale, __m512 x) {
    if (kind == S_F32) {
        _mm512_storeu_ps((float *)data + i, x);
        return;
    }
    if (kind == S_BF16) {
        _mm256_storeu_si256((__m256i *)((uint16_t *)data + i), to_bf16_512(x));
        return;
    }
    x = _mm512_mul_ps(x, scale);
    if (kind == S_F16) { /* of a NaN min and max return their second operand */
        x = _mm512_min_ps(_mm512_set1_ps(65504.0f), x);
        x = _mm512_max_ps(_mm512_set1_ps(-65504.0f), x);
        __m256i code = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
        _mm256_storeu_si256((__m256i *)((uint16_t *)data + i), code);
        return;
    }
    const int mb = kind == S_E4M3 ? 3 : 2, low = kind == S_E4M3 ? 127 - 6 : 127 - 14;
    const __m512i emin = _mm512_set1_epi32(low << 23);
    const __m512i magic = _mm512_set1_epi32(((23 - mb) << 23) | 0x400000);
    __m512i bits = _mm512_castps_si512(x);
    __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __m512i sign = _mm512_srli_epi32(_mm512_xor_si512(bits, magnitude), 24);
    __m512 max = _mm512_set1_ps(kind == S_E4M3 ? 448.0f : 57344.0f);
    __m512 y = _mm512_min_ps(_mm512_castsi512_ps(magnitude), max);
    __m512i e = _mm512_and_si512(_mm512_castps_si512(y), _mm512_set1_epi32(0x7f800000));
    e = _mm512_max_epi32(e, emin);
    __m512i m = _mm512_add_epi32(e, magic);
    __m512 sum = _mm512_add_ps(y, _mm512_castsi512_ps(m));
    __m512i code = _mm512_srli_epi32(_mm512_sub_epi32(e, emin), 23 - mb);
    code = _mm512_add_epi32(code, _mm512_sub_epi32(_mm512_castps_si512(sum), m));
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    code = _mm512_mask_mov_epi32(code, is_nan, _mm512_set1_epi32(0x7f));
    code = _mm512_or_si512(code, sign);
    _mm_storeu_si128((__m128i *)((uint8_t *)data + i), _mm512_cvtepi32_epi8(code));
}

INLINE void copy_16(const struct stored *to, const struct stored *from, size_t i, int kind) {
    if (kind == S_F32) {
        const float *data = (const float *)from->data + i;
        _mm512_storeu_ps((float *)to->data + i, _mm512_loadu_ps(data));
    } else if (kind == S_BF16 || kind == S_F16) {
        const uint16_t *data = (const uint16_t *)from->data + i;
        __m256i raw = _mm256_loadu_si256((const __m256i *)data);
        _mm256_storeu_si256((__m256i *)((uint16_t *)to->data + i), raw);
    } else {
        const uint8_t *data = (const uint8_t *)from->data + i;
        __m128i raw = _mm_loadu_si128((const __m128i *)data);
        _mm_storeu_si128((__m128i *)((uint8_t *)to->data + i), raw);
    }
}

INLINE __m512i larger_16(__m512i seen, __m512 x) {
    __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
    return _mm512_max_epi32(seen, magnitude);
}

INLINE void raise_all(int32_t *amax, __m512i param, __m512i first, __m512i second) {
    const __m512i seen[3] = {param, first, second};
    for (int k = 0; k < 3; k++) {
        int32_t here = _mm512_reduce_max_epi32(seen[k]);
        amax[k] = here > amax[k] ? here : amax[k];
    }
}

INLINE size_t adam_by_16(const struct adam *a, const struct backup *kept, size_t begin, size_t end,
                         const float *scale, const float *guess, int32_t *amax, int kp, int km,
                         int kv, int kg, int is_l2, int keeps[3]) {
#define ALL(x) _mm512_set1_ps(x)
    const __m512 sp = ALL(scale[0]), sm = ALL(scale[1]), sv = ALL(scale[2]), sg = ALL(scale[3]);
    const __m512 qp = ALL(guess[0]), qm = ALL(guess[1]), qv = ALL(guess[2]), decay = ALL(a->decay);
    const __m512 b1 = ALL(a->beta1), c1 = ALL(a->one_minus_beta1), root = ALL(a->inverse_root);
    const __m512 b2 = ALL(a->beta2), c2 = ALL(a->one_minus_beta2), eps = ALL(a->eps);
    const __m512 size = ALL(a->step_size);
#undef ALL
    __m512i mp = _mm512_setzero_si512(), mm = mp, mv = mp;
    size_t i = begin;
    for (; i + 16 <= end; i += 16) {
        __m512 p = load_16(a->param.data, i, kp, sp), m = load_16(a->exp_avg.data, i, km, sm);
        __m512 v = load_16(a->exp_avg_sq.data, i, kv, sv), g = load_16(a->grad.data, i, kg, sg);
        if (keeps[0]) copy_16(&kept->of[0], &a->param, i, kp);
        if (keeps[1]) copy_16(&kept->of[1], &a->exp_avg, i, km);
        if (keeps[2]) copy_16(&kept->of[2], &a->exp_avg_sq, i, kv);
        if (is_l2) g = _mm512_add_ps(g, _mm512_mul_ps(decay, p));
        else p = _mm512_mul_ps(p, decay);
        m = _mm512_add_ps(_mm512_mul_ps(m, b1), _mm512_mul_ps(g, c1));
        v = _mm512_add_ps(_mm512_mul_ps(v, b2), _mm512_mul_ps(_mm512_mul_ps(g, g), c2));
        __m512 divisor = _mm512_add_ps(_mm512_mul_ps(_mm512_sqrt_ps(v), root), eps);
        p = _mm512_sub_ps(p, _mm512_mul_ps(_mm512_div_ps(m, divisor), size));
        if (kp >= S_F16) mp = larger_16(mp, p);
        if (km >= S_F16) mm = larger_16(mm, m);
        if (kv >= S_F16) mv = larger_16(mv, v);
        store_16(a->param.data, i, kp, qp, p);
        store_16(a->exp_avg.data, i, km, qm, m);
        store_16(a->exp_avg_sq.data, i, kv, qv, v);
    }
    raise_all(amax, mp, mm, mv);
    return i;
}

/* The loop of O2 and O3, where everything is in FP16 or E4M3, with half as many instructions.
 *
 * - A power of two as scale is multiplied into the constant that comes next: x * s is exact, so
 *   (x * s) * f and x * (s * f) round the same real number (`folds` has the conditions).
 * - Nothing is clamped, and no NaN is told apart: a value beyond the format changes the scale, and
 *   blocks write the tensor again; one that is not finite makes the scale NaN, and so all values.
 * - 64 elements are looked through for codes of NaN at once; blocks do those that have one.
 */
INLINE int folds(float scale, float factor) {
    uint32_t bits = as_bits(scale); /* a power of two from 2^-100 to 2^100 */
    int is_power = !(bits & 0x807fffffu) && bits >= 27u << 23 && bits <= 227u << 23;
    return is_power && (factor == 0.0f || (factor >= 0x1p-20f && factor <= 0x1p20f));
}

/* 32 codes of E4M3 as FP16 numbers, 2^-8 of theirs; none is NaN. */
INLINE __m512i halves_of_e4m3(const uint8_t *codes) {
    __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)codes));
    return _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16((short)0xbf80));
}

/* Whether there is a NaN among 64 codes. */
INLINE int has_nan(__m512i codes) {
    __m512i all = _mm512_set1_epi8(0x7f);
    return _mm512_cmpeq_epi8_mask(_mm512_and_si512(codes, all), all) != 0;
}

INLINE void copy_64(char *to, const char *from) {
    _mm512_storeu_si512(to, _mm512_loadu_si512(from));
}

static size_t adam_in_half(const struct adam *a, const struct backup *kept, size_t begin, size_t end,
                           const float *scale, const float *guess, int32_t *amax) {
    if (!folds(scale[0], a->decay) || !folds(scale[1], a->beta1) || !folds(scale[2], a->beta2) ||
        !(scale[3] < 0x1p118f))
        return begin;
#define ALL(x) _mm512_set1_ps(x)
    const __m512 sp = ALL(scale[0] * a->decay), sm = ALL(scale[1] * 256.0f * a->beta1);
    const __m512 sv = ALL(scale[2] * a->beta2), sg = ALL(scale[3] * 256.0f);
    const __m512 qp = ALL(guess[0]), qm = ALL(guess[1]), qv = ALL(guess[2]);
    const __m512 c1 = ALL(a->one_minus_beta1), c2 = ALL(a->one_minus_beta2);
    const __m512 root = ALL(a->inverse_root), eps = ALL(a->eps), size = ALL(a->step_size);
#undef ALL
    uint16_t *param = a->param.data, *second = a->exp_avg_sq.data;
    uint8_t *first = a->exp_avg.data;
    const uint8_t *grad = a->grad.data;
    char *old_param = kept->of[0].data, *old_first = kept->of[1].data;
    char *old_second = kept->of[2].data;
    __m512i mp = _mm512_setzero_si512(), mm = mp, mv = mp;
    size_t i = begin;
    for (; i + 64 <= end; i += 64) {
        __m512i codes = _mm512_loadu_si512(first + i);
        if (has_nan(codes) || has_nan(_mm512_loadu_si512(grad + i))) break;
        _mm512_storeu_si512(old_first + i, codes);
        for (size_t k = 0; k < 128; k += 64) {
            copy_64(old_param + 2 * i + k, (const char *)(param + i) + k);
            copy_64(old_second + 2 * i + k, (const char *)(second + i) + k);
        }
        for (size_t j = i; j < i + 64; j += 32) {
            __m512i m_halves = halves_of_e4m3(first + j), g_halves = halves_of_e4m3(grad + j);
            for (int half = 0; half < 2; half++) {
                size_t at = j + 16 * (size_t)half;
#define HALF(x) (half ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x))
#define WIDE(x) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x)))
                __m512 p = _mm512_mul_ps(WIDE(param + at), sp);
                __m512 v = _mm512_mul_ps(WIDE(second + at), sv);
                __m512 m = _mm512_mul_ps(_mm512_cvtph_ps(HALF(m_halves)), sm);
                __m512 g = _mm512_mul_ps(_mm512_cvtph_ps(HALF(g_halves)), sg);
#undef WIDE
#undef HALF
                m = _mm512_add_ps(m, _mm512_mul_ps(g, c1));
                v = _mm512_add_ps(v, _mm512_mul_ps(_mm512_mul_ps(g, g), c2));
                __m512 divisor = _mm512_mul_ps(_mm512_sqrt_ps(v), root);
                divisor = _mm512_add_ps(divisor, eps);
                p = _mm512_sub_ps(p, _mm512_mul_ps(_mm512_div_ps(m, divisor), size));
                __m512 number;
                _mm_storeu_si128((__m128i *)(first + at), encode_512(m, qm, E4M3, &number));
                mm = larger_16(mm, m);
                mp = larger_16(mp, p);
                mv = larger_16(mv, v);
#define NARROW(x) _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)
                _mm256_storeu_si256((__m256i *)(param + at), NARROW(_mm512_mul_ps(p, qp)));
                _mm256_storeu_si256((__m256i *)(second + at), NARROW(_mm512_mul_ps(v, qv)));
#undef NARROW
            }
        }
    }
    raise_all(amax, mp, mm, mv);
    return i;
}

/* Constant kinds make the loops of O1 and of O2 and O3; the last one serves all others. Returns
 * where the elements begin that are left over. */
static size_t adam_in_registers(const struct adam *a, const struct backup *kept, size_t begin,
                                size_t end, const float *scale, const float *guess,
                                int32_t *amax) {
    const struct stored *all[3] = {&a->param, &a->exp_avg, &a->exp_avg_sq};
    int kp = a->param.kind, km = a->exp_avg.kind, kv = a->exp_avg_sq.kind, kg = a->grad.kind;
    int keeps[3];
    for (int k = 0; k < 3; k++) {
        keeps[k] = is_backed_up(a, all[k]);
        if (all[k]->stochastic) return begin;
    }
#define RUN(P, M, V, G, L2) \
    adam_by_16(a, kept, begin, end, scale, guess, amax, P, M, V, G, L2, keeps)
    if (!a->is_l2 && kp == S_F16 && kg == S_E4M3) {
        if (km == S_E4M3 && kv == S_F16)
            begin = adam_in_half(a, kept, begin, end, scale, guess, amax);
        if (km == S_F32 && kv == S_F32) return RUN(S_F16, S_F32, S_F32, S_E4M3, 0);
    }
    return RUN(kp, km, kv, kg, a->is_l2);
#undef RUN
}
#else
static size_t adam_in_registers(const struct adam *a, const struct backup *kept, size_t begin,
                                size_t end, const float *scale, const float *guess,
                                int32_t *amax) {
    (void)a, (void)kept, (void)end, (void)scale, (void)guess, (void)amax;
    return begin;
}
#endif
