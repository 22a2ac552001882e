// Mappings of memory: a zeroed buffer that grows on demand, and a slab allocator for weights.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace baton {

// A mapping of private memory or of a file, unmapped with its owner. Large ones are aligned to a huge page.
class Mapping {
public:
    Mapping() = default;
    ~Mapping();
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&& other) noexcept;

    static Mapping zeroed(size_t bytes);                                      // throws std::bad_alloc
    static Mapping of_file(int file, size_t offset, size_t bytes, bool writable);  // throws std::system_error

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }

private:
    Mapping(uint8_t* data, size_t bytes) : data_(data), bytes_(bytes) {}

    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

// A zeroed buffer that grows on demand, and is freed with its owner only.
class GrowingBuffer {
public:
    // Provide at least this many bytes. Growing discards the old content and zeroes the memory. Throws std::bad_alloc.
    void* reserve(size_t bytes);

    template <class T>
    T* reserve_of(int64_t count) {
        return static_cast<T*>(reserve(size_t(count) * sizeof(T)));
    }

private:
    Mapping memory_;
};

// Allocates zeroed memory from slabs of huge pages, freed with their owner. Separate mappings would mostly consist of
// small pages, and the hardware prefetcher of a core stops at the end of every page.
// The slabs are private memory, or parts of one file that other processes map too (shared_weights.h).
class SlabAllocator {
public:
    template <class T>
    T* allocate(int64_t count) {
        return static_cast<T*>(allocate_bytes(size_t(count) * sizeof(T)));
    }

    // Take all slabs from this empty file, which stays open until `seal_file`.
    void use_file(int file) { file_ = file; }
    bool has_file() const { return file_ != NO_FILE; }
    uint8_t* first() const { return slabs_.front().memory.data(); }
    int64_t offset_of(const void* allocated) const;  // in the file
    // Unmap all slabs, and end all writes to the file by a seal. Return the file. Throws std::system_error.
    int seal_file();
    // Hold a mapping with weights, instead of slabs.
    const Mapping& keep(Mapping mapping);

private:
    static constexpr int NO_FILE = -1;
    struct Slab {
        Mapping memory;
        size_t offset;  // in the file
    };

    void* allocate_bytes(size_t bytes);  // throws std::bad_alloc
    Mapping new_slab(size_t bytes);

    std::vector<Slab> slabs_;
    uint8_t* next_ = nullptr;
    size_t left_ = 0;
    int file_ = NO_FILE;
    size_t file_bytes_ = 0;
};

}  // namespace baton
