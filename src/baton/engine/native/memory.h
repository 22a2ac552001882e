// Zeroed memory in large pieces that grow and are never given back while their owner lives.
#pragma once
#include <cstddef>
#include <cstdint>

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

}  // namespace baton
