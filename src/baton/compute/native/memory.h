// A zeroed buffer that grows on demand, and is freed with its owner only; and a slab allocator for weights.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace baton {

class GrowingBuffer {
public:
    GrowingBuffer() = default;
    ~GrowingBuffer();
    GrowingBuffer(GrowingBuffer&& other) noexcept;
    GrowingBuffer(const GrowingBuffer&) = delete;
    GrowingBuffer& operator=(const GrowingBuffer&) = delete;

    // Provide at least this many bytes. Growing discards the old content and zeroes the memory. Throws std::bad_alloc.
    void* reserve(size_t bytes);

    template <class T>
    T* reserve_of(int64_t count) {
        return static_cast<T*>(reserve(size_t(count) * sizeof(T)));
    }

private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

// Allocates zeroed memory from slabs of huge pages, freed with their owner. Separate mappings would mostly consist of
// small pages, and the hardware prefetcher of a core stops at the end of every page.
class SlabAllocator {
public:
    template <class T>
    T* allocate(int64_t count) {
        return static_cast<T*>(allocate_bytes(size_t(count) * sizeof(T)));
    }

private:
    void* allocate_bytes(size_t bytes);  // throws std::bad_alloc

    std::vector<GrowingBuffer> slabs_;
    uint8_t* next_ = nullptr;
    size_t left_ = 0;
};

}  // namespace baton
