// The loader for C++17: owners that free what they have, and a range over batches. twinbuf.h documents the calls.
//
// A call that fails throws twinbuf::Error, but not in release() and destructors. An owner can be moved, and not copied.
#pragma once
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>
#include "twinbuf.h"

namespace twinbuf {
struct Error : std::runtime_error {
    int code;
    std::string path;     // empty: no file
    int64_t offset;       // -1: none
    explicit Error(int of, const twinbuf_error *last = twinbuf_last_error())
        : std::runtime_error(last ? last->message : "the thread is ending"), code(of),
          path(last && last->path ? last->path : ""), offset(last ? last->offset : -1) {}
};
// Returns an outcome that is no error.
template <class Code> Code check(Code code) {
    if (code < 0) throw Error(static_cast<int>(code));
    return code;
}
// A struct of twinbuf.h with its size set and all other fields 0.
template <class Struct> Struct make() {
    Struct made{};
    made.size = sizeof made;
    return made;
}

// A batch. It is released at the end of its life, or by release().
class Batch {
    twinbuf_batch batch = make<twinbuf_batch>();
    friend struct Loader;

  public:
    Batch() = default;
    Batch(Batch &&other) noexcept : batch(std::exchange(other.batch, make<twinbuf_batch>())) {}
    Batch &operator=(Batch &&other) noexcept { Batch got(std::move(other)); return std::swap(batch, got.batch), *this; }
    ~Batch() { release(); }
    void release() noexcept {
        if (batch.id) twinbuf_release(&batch);
        batch = make<twinbuf_batch>();
    }
    void keep() { check(twinbuf_keep(&batch)); }
    uint8_t *data() const { return batch.data; }
    std::size_t size() const { return batch.len; }
    uint8_t *begin() const { return data(); }
    uint8_t *end() const { return data() + size(); }
    uint64_t records() const { return batch.records; }
    uint64_t epoch() const { return batch.epoch; }
    uint64_t step() const { return batch.step; }
};
// Frees a handle.
template <class Handle> class Owner {
  protected:
    Handle *handle = nullptr;
    Owner() = default;

  public:
    Owner(Owner &&other) noexcept : handle(std::exchange(other.handle, nullptr)) {}
    Owner &operator=(Owner &&other) noexcept { Owner got(std::move(other)); return std::swap(handle, got.handle), *this; }
    ~Owner() { twinbuf_free(handle); }
    Handle *get() const { return handle; }  // for the functions of twinbuf.h
};

struct Records : Owner<twinbuf_records> {
    explicit Records(const std::vector<std::string> &paths, twinbuf_files files = make<twinbuf_files>()) {
        std::vector<const char *> texts;
        for (const auto &path : paths) texts.push_back(path.c_str());
        files.paths = texts.data();
        files.count = texts.size();
        check(twinbuf_open(&files, &handle));
    }
    twinbuf_description describe() const {
        auto found = make<twinbuf_description>();
        check(twinbuf_describe(handle, &found));
        return found;
    }
};

struct Loader : Owner<twinbuf_loader> {
    Loader(const Records &records, const twinbuf_options &options) {
        check(twinbuf_load(records.get(), &options, &handle));
    }
    void epochs(uint64_t first, uint64_t end) { check(twinbuf_epochs(handle, first, end)); }
    void resume(std::string text, uint64_t end) {
        auto from = make<twinbuf_text>();
        from.bytes = text.data(), from.len = text.size();
        check(twinbuf_resume(handle, &from, end));
    }
    // TWINBUF_OK, TWINBUF_END or TWINBUF_PENDING. Releases what `batch` had.
    int next(Batch &batch, uint64_t wait_ms = UINT64_MAX) {
        batch.release();
        return check(twinbuf_next(handle, &batch.batch, wait_ms));
    }
    std::string checkpoint() const {
        auto text = make<twinbuf_text>();
        std::string bytes;
        while (check(twinbuf_checkpoint(handle, &text)) == TWINBUF_SHORT) {
            bytes.resize(text.len + 1);
            text.bytes = bytes.data(), text.capacity = bytes.size();
        }
        return bytes.resize(text.len), bytes;
    }
    void close(uint64_t wait_ms = UINT64_MAX) { check(twinbuf_close(handle, wait_ms)); }
    // `for (auto &batch : loader)`: each batch is released before the next one is asked for.
    struct Iterator {
        Loader *loader;
        Batch batch;
        explicit Iterator(Loader *from) : loader(from) { ++*this; }
        void operator++() { if (loader->next(batch) == TWINBUF_END) loader = nullptr; }
        Batch &operator*() { return batch; }
        bool operator!=(std::nullptr_t) const { return loader; }
    };
    Iterator begin() { return Iterator(this); }
    std::nullptr_t end() { return nullptr; }
};
}  // namespace twinbuf
