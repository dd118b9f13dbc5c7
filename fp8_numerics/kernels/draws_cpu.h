/* Random bytes by a counter: Philox 4x32 in ten rounds (Salmon et al., SC 2011, table 2).
 *
 * The 16 bytes of one counter belong to 16 columns that follow each other. The bytes are those of
 * philox.py.
 */
#include "elements_cpu.h"

#define DRAW_LANES 64 /* counters that are computed together */
#define DRAW_BYTES 16 /* of one counter */

/* Counters that wait to be computed together, of one row or of several: of each span of columns, its
 * first lane, where its bytes go, and which of the lanes' bytes these are. */
struct draws {
    uint32_t a[DRAW_LANES], b[DRAW_LANES], c[DRAW_LANES], d[DRAW_LANES];
    size_t lanes, spans;
    struct { uint8_t *out; size_t from, size; } span[DRAW_LANES];
};

static void draw_all(struct draws *waiting, const uint32_t *key) {
    uint32_t a[DRAW_LANES], b[DRAW_LANES], c[DRAW_LANES], d[DRAW_LANES], words[DRAW_LANES][4];
    uint32_t k0 = key[0], k1 = key[1];
    memcpy(a, waiting->a, sizeof a);
    memcpy(b, waiting->b, sizeof b);
    memcpy(c, waiting->c, sizeof c);
    memcpy(d, waiting->d, sizeof d);
    for (int round = 0; round < 10; round++) {
        for (size_t i = 0; i < DRAW_LANES; i++) {
            const uint64_t p = (uint64_t)0xD2511F53u * a[i], q = (uint64_t)0xCD9E8D57u * c[i];
            a[i] = (uint32_t)(q >> 32) ^ b[i] ^ k0;
            c[i] = (uint32_t)(p >> 32) ^ d[i] ^ k1;
            b[i] = (uint32_t)q;
            d[i] = (uint32_t)p;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (size_t i = 0; i < DRAW_LANES; i++) {
        words[i][0] = a[i];
        words[i][1] = b[i];
        words[i][2] = c[i];
        words[i][3] = d[i];
    }
    for (size_t s = 0; s < waiting->spans; s++)
        memcpy(waiting->span[s].out, (uint8_t *)words + waiting->span[s].from,
               waiting->span[s].size);
    waiting->lanes = waiting->spans = 0;
}

/* Let the bytes of columns `begin` to `end` of one row wait. */
INLINE void draw_row(struct draws *waiting, size_t begin, size_t end, uint32_t position,
                     uint64_t sample, const uint32_t *key, uint8_t *out) {
    while (begin < end) {
        const size_t block = begin / DRAW_BYTES, skip = begin % DRAW_BYTES, at = waiting->lanes;
        size_t lanes = (skip + end - begin + DRAW_BYTES - 1) / DRAW_BYTES;
        lanes = lanes < DRAW_LANES - at ? lanes : DRAW_LANES - at;
        for (size_t i = 0; i < lanes; i++) {
            waiting->a[at + i] = (uint32_t)(block + i);
            waiting->b[at + i] = position;
            waiting->c[at + i] = (uint32_t)sample;
            waiting->d[at + i] = (uint32_t)(sample >> 32);
        }
        size_t size = lanes * DRAW_BYTES - skip;
        size = size < end - begin ? size : end - begin;
        waiting->span[waiting->spans].out = out;
        waiting->span[waiting->spans].from = at * DRAW_BYTES + skip;
        waiting->span[waiting->spans++].size = size;
        waiting->lanes += lanes;
        begin += size;
        out += size;
        if (waiting->lanes == DRAW_LANES) draw_all(waiting, key);
    }
}

/* One byte for each element of `out` [rows, cols]. A row is a position of a sample; the columns are
 * those of `ranges`, pairs of begin and end whose lengths add up to `cols`. */
void megafp8_draw(const int64_t *samples, const int64_t *positions, size_t rows,
                  const int64_t *ranges, size_t num_ranges, size_t cols, const uint32_t *key,
                  uint8_t *out, int threads) {
    if (rows * cols < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t first, last;
        struct draws waiting = {.lanes = 0};
        share(rows, threads, t, &first, &last);
        for (size_t row = first; row < last; row++) {
            uint8_t *to = out + row * cols;
            for (size_t i = 0; i < num_ranges; i++) {
                const size_t begin = (size_t)ranges[2 * i], end = (size_t)ranges[2 * i + 1];
                draw_row(&waiting, begin, end, (uint32_t)positions[row], (uint64_t)samples[row],
                         key, to);
                to += end - begin;
            }
        }
        if (waiting.lanes) draw_all(&waiting, key);
    }
}
