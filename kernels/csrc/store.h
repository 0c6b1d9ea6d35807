// Stores K and V in the cache. Included for each instruction set, in its namespace.

/// Stores K and V of one token and head in its slot.
template <class T>
INLINE void store_head(const Cache& cache, int layer, int head, int64_t slot, const T* k, const T* v) {
    constexpr int PAIR = sizeof(T) == 2 ? 2 : 1;
    const int dim = cache.dim, at = int(slot % cache.block_size);
    uint8_t* page = cache.pool + slot / cache.block_size * cache.block_bytes + cache.head_at(layer, head) +
                    at / PAGE * cache.page_bytes();
    const int key = at % PAGE;
    T* keys = reinterpret_cast<T*>(page) + key * PAIR;
    T* values = reinterpret_cast<T*>(page) + PAGE * dim + int64_t(key / PAIR) * dim * PAIR + key % PAIR;
    for (int d = 0; d < dim; d += PAIR) __builtin_memcpy(keys + d * PAGE, k + d, 4);
    if (PAIR == 1)
        __builtin_memcpy(values, v, dim * sizeof(T));
    else
        for (int d = 0; d < dim; d++) values[d * PAIR] = v[d];
}

static void store_row(const Cache& cache, const Batch& batch, int layer, const void* k, int64_t k_stride, const void* v,
                      int64_t v_stride, int row) {
    const int64_t slot = batch.slots[row];
    if (slot < 0) return;
    for (int head = 0; head < cache.kv_heads; head++) {
        const int64_t from_k = row * k_stride + int64_t(head) * cache.dim, from_v = row * v_stride + int64_t(head) * cache.dim;
        if (cache.is_bf16)
            store_head(cache, layer, head, slot, static_cast<const bf16*>(k) + from_k, static_cast<const bf16*>(v) + from_v);
        else
            store_head(cache, layer, head, slot, static_cast<const float*>(k) + from_k, static_cast<const float*>(v) + from_v);
    }
}
