#include "shared_weights.h"

#include <sys/stat.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace baton {
namespace {

constexpr int64_t NULL_OFFSET = -1;

// The first bytes of the file. The table lists the model's numbers and, as offsets in the file, its pointers.
struct Header {
    char key[128];  // of the library and the form of the weights
    Sizes sizes;
    DType dtype;
    int64_t table_at, table_bytes;
};

class TableWriter {
public:
    explicit TableWriter(const SlabAllocator& weights) : weights_(weights) {}

    template <class T>
    void number(const T& number) {
        const uint8_t* first = reinterpret_cast<const uint8_t*>(&number);
        bytes.insert(bytes.end(), first, first + sizeof number);
    }

    template <class T>
    void pointer(const T* address) {
        number(address == nullptr ? NULL_OFFSET : weights_.offset_of(address));
    }

    template <class T>
    void list(std::vector<T>& items) {
        number(items.size());
        for (T& item : items) exchange(*this, item);
    }

    std::vector<uint8_t> bytes;

private:
    const SlabAllocator& weights_;
};

class TableReader {
public:
    TableReader(const Mapping& file, int64_t table_at, int64_t table_bytes)
        : file_(file), next_(file.data() + table_at), left_(size_t(table_bytes)) {}

    template <class T>
    void number(T& number) {
        if (left_ < sizeof number) throw std::runtime_error("the table of the shared weights is cut off");
        std::memcpy(&number, next_, sizeof number);
        next_ += sizeof number, left_ -= sizeof number;
    }

    template <class T>
    void pointer(const T*& address) {
        int64_t offset;
        number(offset);
        if (offset < NULL_OFFSET || offset >= int64_t(file_.bytes()))
            throw std::runtime_error("the shared weights name bytes behind their end");
        address = offset == NULL_OFFSET ? nullptr : reinterpret_cast<const T*>(file_.data() + offset);
    }

    template <class T>
    void list(std::vector<T>& items) {
        size_t count;
        number(count);
        if (count > left_) throw std::runtime_error("the table of the shared weights is cut off");
        items.resize(count);
        for (T& item : items) exchange(*this, item);
    }

private:
    const Mapping& file_;
    const uint8_t* next_;
    size_t left_;
};

// One function per structure writes it to a table and reads it again.

template <class Table>
void exchange(Table& table, Linear& linear) {
    table.pointer(linear.panels), table.pointer(linear.bias);
    table.number(linear.dtype), table.number(linear.rows_dtype);
    table.number(linear.outputs), table.number(linear.inputs);
}

template <class Table>
void exchange(Table& table, LatentLayer& latent) {
    table.pointer(latent.q_norm), table.pointer(latent.kv_norm);
    exchange(table, latent.queries);
    table.list(latent.keys), table.list(latent.values);
}

template <class Table>
void exchange(Table& table, Layer& layer) {
    table.pointer(layer.input_norm), table.pointer(layer.mlp_norm);
    table.pointer(layer.q_norm), table.pointer(layer.k_norm);
    exchange(table, layer.qkv), exchange(table, layer.o);
    exchange(table, layer.latent);
    table.number(layer.window);
}

template <class Table>
void exchange(Table& table, Mlp& mlp) {
    exchange(table, mlp.gate_up), exchange(table, mlp.down);
}

template <class Table>
void exchange(Table& table, Mlps& mlps) {
    table.list(mlps.all);
    exchange(table, mlps.router);
    table.number(mlps.experts), table.number(mlps.experts_per_token);
    table.number(mlps.sigmoid), table.number(mlps.normalized), table.number(mlps.scale);
    table.number(mlps.groups), table.number(mlps.groups_used), table.number(mlps.group_best);
    table.pointer(mlps.choice_bias);
}

template <class Table>
void exchange(Table& table, Model& model) {
    table.list(model.layers), table.list(model.mlps);
    table.pointer(model.final_norm);
    exchange(table, model.head), exchange(table, model.embedding);
}

// Everything before `table_at` has to be equal in the file and in the process that attaches it.
Header header_of(const Model& model, const std::string& key) {
    Header header;
    if (key.size() >= sizeof header.key) throw std::logic_error("the key of the shared weights is too long");
    std::memset(&header, 0, sizeof header);
    std::memcpy(header.key, key.data(), key.size());
    header.sizes = model.sizes, header.dtype = model.dtype;
    return header;
}

}  // namespace

void begin_sharing(Model& model, int file, const std::string& key) {
    model.weights.use_file(file);
    *model.weights.allocate<Header>(1) = header_of(model, key);
}

void finish_sharing(Model& model) {
    TableWriter table(model.weights);
    exchange(table, model);
    uint8_t* const place = model.weights.allocate<uint8_t>(int64_t(table.bytes.size()));
    std::memcpy(place, table.bytes.data(), table.bytes.size());
    Header& header = *reinterpret_cast<Header*>(model.weights.first());
    header.table_at = model.weights.offset_of(place), header.table_bytes = int64_t(table.bytes.size());
    const std::string key = header.key;
    attach_weights(model, model.weights.seal_file(), key);
}

void attach_weights(Model& model, int file, const std::string& key) {
    struct stat status;
    if (fstat(file, &status) != 0 || size_t(status.st_size) < sizeof(Header))
        throw std::runtime_error("the file of the weights is empty");
    Mapping mapping = Mapping::of_file(file, 0, size_t(status.st_size), false);
    Header found;
    const Header wanted = header_of(model, key);
    std::memcpy(&found, mapping.data(), sizeof found);
    if (std::memcmp(&found, &wanted, offsetof(Header, table_at)) != 0)
        throw std::runtime_error("the file has the weights of another model or version");
    const int64_t bytes = int64_t(mapping.bytes());
    if (found.table_at < 0 || found.table_bytes < 0 || found.table_at > bytes - found.table_bytes)
        throw std::runtime_error("the table of the shared weights is cut off");
    TableReader table(model.weights.keep(std::move(mapping)), found.table_at, found.table_bytes);
    exchange(table, model);
}

}  // namespace baton
