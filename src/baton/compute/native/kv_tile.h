// Where a tile's keys and values lie in the arena, and their prefetch into the cache.
#pragma once
#include "types.h"

namespace baton {
namespace {

// The addresses of a tile's keys. All KV heads of a token are adjacent. Values are one plane further; latents are both.
struct KVTile {
    int first_key, valid;  // keys [valid, TILE_KEYS) are behind the end of the context
    const uint8_t* keys[TILE_KEYS];
    int64_t plane_bytes;

    void locate(const Attention& call, const Slice& slice, int first, int end) {
        const Arena& arena = *call.arena;
        first_key = first;
        valid = end - first_key < TILE_KEYS ? end - first_key : TILE_KEYS;
        plane_bytes = (arena.planes - 1) * arena.plane_bytes();
        int block = first_key / arena.block_tokens, slot = first_key % arena.block_tokens;
        for (int key = 0; key < valid; key++) {
            keys[key] = slot == 0 || key == 0 ? arena.row(slice.blocks[block], call.layer, 0, slot)
                                              : keys[key - 1] + arena.token_bytes;
            if (++slot == arena.block_tokens) slot = 0, block++;
        }
    }
};

// Prefetches the next tile in small portions while the current one is computed, because a core has few line fill
// buffers.
class TilePrefetcher {
public:
    // Prefetch bytes [from, to) of each key and value while `heads` heads of the current tile are computed.
    // null: there is no next tile.
    TilePrefetcher(const KVTile* tile, int64_t from, int64_t to, int heads)
        : tile_(tile), from_(from), to_(to), head_rows_((2 * TILE_KEYS + heads - 1) / heads),
          rows_(tile == nullptr ? 0 : tile->plane_bytes == 0 ? tile->valid : 2 * tile->valid), left_(rows_) {}

    // Prefetch the portion of one of `portions` equal portions of a head's work: keys first, then values, in memory
    // order.
    void prefetch_portion(int portions) {
        for (int due = (head_rows_ + portions - 1) / portions; due > 0 && left_ > 0; due--, left_--) {
            const int key = rows_ - left_;
            const uint8_t* row =
                key < tile_->valid ? tile_->keys[key] : tile_->keys[key - tile_->valid] + tile_->plane_bytes;
            // Into the second-level cache: a tile does not fit into the first.
            for (int64_t at = from_; at < to_; at += 64) __builtin_prefetch(row + at, 0, 2);
        }
    }

private:
    const KVTile* tile_;
    int64_t from_, to_;
    int head_rows_, rows_, left_;
};

}  // namespace
}  // namespace baton
