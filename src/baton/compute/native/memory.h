// Zeroed memory that grows, and is only freed with its owner.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace baton {

class Memory {
public:
    Memory() = default;
    ~Memory();
    Memory(Memory&& other) noexcept;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

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

// Zeroed allocations from slabs of huge pages, freed with their owner. Separate mappings would mostly consist of small
// pages, and the hardware prefetcher of a core stops at the end of every page.
class Slabs {
public:
    template <class T>
    T* take(int64_t count) {
        return static_cast<T*>(take_bytes(size_t(count) * sizeof(T)));
    }

private:
    void* take_bytes(size_t bytes);  // throws std::bad_alloc

    std::vector<Memory> slabs_;
    uint8_t* next_ = nullptr;
    size_t left_ = 0;
};

}  // namespace baton
