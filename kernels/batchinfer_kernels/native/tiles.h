/* Products of bytes in AMX's tiles: registers of 16 rows of 64 bytes, sixteen of whose products are one instruction.
 *
 * They give the very integers that fours of bytes in 512-bit registers give (`dot_fours`), and so every number that is
 * computed from them stays the same, bit by bit, on processors without them.
 */

#ifndef BATCHINFER_TILES_H
#define BATCHINFER_TILES_H

#include <immintrin.h>
#include <stdint.h>

/* A tile. */
enum { TILE_ROWS = 16, TILE_BYTES = 64 };

#ifdef __AMX_INT8__
/* Whether the processor has tiles and the operating system lets this process use them. */
extern int batchinfer_tiles;

/* Rows and bytes of a row of each of the eight tiles, as the instruction takes them. */
struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed, aligned(64)));

/* What the compiler keeps in registers is written before a tile is loaded of it: the instruction's own memory is not
 * known to it. */
#define WRITTEN() __asm__ volatile("" ::: "memory")
#else
enum { batchinfer_tiles = 0 };
#endif

#endif
