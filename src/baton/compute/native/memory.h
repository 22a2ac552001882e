// Zeroed memory in large pieces that grow and are never given back while their owner lives.
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

    // Make room for so many bytes. Growing loses what was there; what is new is zero. Throws std::bad_alloc.
    void* reserve(size_t bytes);

    template <class T>
    T* reserve_of(int64_t count) {
        return static_cast<T*>(reserve(size_t(count) * sizeof(T)));
    }

private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

// Zeroed pieces that live as long as their owner, cut from slabs of large pages. Each in a mapping of its own would lie
// in small pages, but for the few large ones that fit whole: and a core that reads on begins anew in every page.
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
