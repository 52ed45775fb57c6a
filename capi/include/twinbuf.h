// A loader that reads the next batch of records while the current one is used. capi/README.md has a program, and what is stable.
//
// Each call but twinbuf_version and twinbuf_last_error returns TWINBUF_OK, another number that is not negative, or a
// TWINBUF_ERROR_* that twinbuf_last_error explains. A pointer that is passed must be NULL or valid. A handle need not be:
// its value is a number that is looked up, never followed, and never given twice. So a call with a handle that was freed
// is an error. Records and loaders are freed by twinbuf_free, and batches by twinbuf_release.
//
// After fork(), only the process that made a loader can use it. If another thread is inside a call during fork(), calls
// of the child can wait without end. So can a call in a signal handler, twinbuf_cancel too: let a thread that waits in
// sigwait() make it. pthread_cancel of a thread inside a call can abort the process.

#ifndef TWINBUF_H
#define TWINBUF_H

/* Made by ci/capi.sh from capi/src: change it there. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// The version of this header. A library with the same major version and at least this minor one runs programs built
// with it.
#define TWINBUF_VERSION_MAJOR 0

// It grows when functions, fields or codes are added.
#define TWINBUF_VERSION_MINOR 1

// It grows with each release between these.
#define TWINBUF_VERSION_PATCH 0

// The version as one number, which grows with each release. twinbuf_version returns that of the library.
#define TWINBUF_VERSION (((TWINBUF_VERSION_MAJOR * 1000000) + (TWINBUF_VERSION_MINOR * 1000)) + TWINBUF_VERSION_PATCH)

// Records of `record_bytes` bytes behind `header` bytes.
#define TWINBUF_FORMAT_RAW 0

// The rows of `.npy` files.
#define TWINBUF_FORMAT_NPY 1

// The tokens of llm.c's files.
#define TWINBUF_FORMAT_LLM_C 2

// Through the page cache; on Linux, what does not fit in memory goes past it if the files allow that.
#define TWINBUF_READ_AUTO 0

// Through the page cache.
#define TWINBUF_READ_PREAD 1

// Past the page cache, on Linux. On other systems twinbuf_load returns TWINBUF_ERROR_FILE.
#define TWINBUF_READ_DIRECT 2

// The records that do not fill a step of all ranks are omitted.
#define TWINBUF_LAST_DROP 0

// They form a smaller last batch, divided among the ranks. A rank may then have a step fewer.
#define TWINBUF_LAST_KEEP 1

// They are filled up with the first records of the epoch's order.
#define TWINBUF_LAST_WRAP 2

// The call succeeded.
#define TWINBUF_OK 0

// The epochs are over: there is no further batch.
#define TWINBUF_END 1

// No batch was ready within the timeout.
#define TWINBUF_PENDING 2

// The text does not fit into the caller's memory. Its length was stored.
#define TWINBUF_SHORT 3

// A pointer is NULL.
#define TWINBUF_ERROR_NULL -1

// A handle was already released or freed, is one of another kind, or is none of this library.
#define TWINBUF_ERROR_HANDLE -2

// The loader is closed.
#define TWINBUF_ERROR_CLOSED -3

// Another thread uses the loader, or a call on it has panicked.
#define TWINBUF_ERROR_BUSY -4

// An option or an environment variable has a wrong value, or the options do not fit the records or the memory.
#define TWINBUF_ERROR_OPTION -5

// A file cannot be opened or checked, or is not of the format; or the trace cannot be written.
#define TWINBUF_ERROR_FILE -6

// A batch could not be read.
#define TWINBUF_ERROR_READ -7

// The next slot holds a batch that was not released.
#define TWINBUF_ERROR_HELD -8

// The text is no checkpoint, or one of another plan or other files. It has no checksum: keep it where bytes stay
// right.
#define TWINBUF_ERROR_CHECKPOINT -9

// A read did not end within the timeout. Its thread was left behind.
#define TWINBUF_ERROR_TIMEOUT -10

// The library panicked. This is a bug of it.
#define TWINBUF_ERROR_PANIC -11

// Another error.
#define TWINBUF_ERROR_OTHER -12

// No epochs were begun.
#define TWINBUF_ERROR_EPOCHS -13

// twinbuf_cancel ended the wait.
#define TWINBUF_ERROR_CANCELLED -14

// The `size` of a struct is wrong, or the struct sets a field that this library does not have.
#define TWINBUF_ERROR_SIZE -15

// Reads the batches of a plan ahead of their use. One thread at a time may use it, but for twinbuf_steps,
// twinbuf_cancel and twinbuf_free.
typedef struct twinbuf_loader twinbuf_loader;

// The records of files. Any number of threads may use it, and any number of loaders.
typedef struct twinbuf_records twinbuf_records;

// Files of records. An optional field that is 0 has its default, so begin with `{.size = sizeof(twinbuf_files)}`.
typedef struct {
  // The size of this struct in the program.
  size_t size;
  // The paths. The files in this order are the data set. May be NULL if `count` is 0, which is TWINBUF_ERROR_FILE.
  const char *const *paths;
  // The number of paths.
  size_t count;
  // TWINBUF_FORMAT_*.
  uint32_t format;
  // Bytes of a record, at least 1, for TWINBUF_FORMAT_RAW.
  size_t record_bytes;
  // Bytes at the start of each file that are skipped, for TWINBUF_FORMAT_RAW.
  uint64_t header;
  // For the other formats: a record is `sequence + 1` rows or tokens, and begins `sequence` after the one before it.
  // With 0 each row or token is a record.
  size_t sequence;
} twinbuf_files;

// What records hold. `size` must be set before twinbuf_describe.
typedef struct {
  // The size of this struct in the program.
  size_t size;
  // The number of records.
  uint64_t count;
  // Bytes of a record.
  uint64_t record_bytes;
  // Bytes before the records of the first file.
  uint64_t header;
  // The type of an element, little-endian, and a NUL: `bytes` for bytes without a type, otherwise `bool`, `u8` to
  // `u64`, `i8` to `i64`, `f16`, `f32`, `f64`, `c64`, `c128`, or one that a later version adds.
  char dtype[12];
  // The number of dimensions of a record. 0: a record is one element.
  uint32_t dimensions;
  // The elements of a record along each dimension, in C order; the first 8 dimensions.
  uint64_t shape[8];
} twinbuf_description;

// Which records form which batch, and how they are read. An optional field that is 0 has its default, so begin with
// `{.size = sizeof(twinbuf_options)}`.
typedef struct {
  // The size of this struct in the program.
  size_t size;
  // Records in a batch of this rank. At least 1.
  uint64_t batch;
  // The first record.
  uint64_t first;
  // The number of records from `first` on. Default: all.
  uint64_t records;
  // Records in random order if it is not 0. Default: in the order of the files.
  uint32_t shuffle;
  // TWINBUF_LAST_*: what becomes of the records that do not fill a step of all ranks.
  uint32_t last_batch;
  // Only with `shuffle`: the shuffle is within a sliding window of so many chunks. Default: all records are
  // shuffled.
  uint64_t window;
  // Records in a chunk of the window. At least 1 with `window`, 0 without.
  uint64_t chunk;
  // With `shuffle`: the same seed gives the same order, on any machine. Without it only 0 is allowed.
  uint64_t seed;
  // This process: less than `world`.
  uint64_t rank;
  // Processes that share the records. Default: 1.
  uint64_t world;
  // If it is not 0, TWINBUF_DEPTH, TWINBUF_WORKERS and other variables of the environment that are set change the
  // options.
  uint32_t environment;
  // TWINBUF_READ_*.
  uint32_t read_mode;
  // The number of reading threads. Default: 1.
  size_t workers;
  // The number of slots. Default: as many as fit 2 MiB in whole pages of 4 KiB, 16 at most; if those are fewer than
  // the workers plus 2, the workers plus 3. From 16 MiB each on, or with TWINBUF_MEMORY, the workers plus 2. 2 for
  // one worker with slots of 16 MiB or more, and where TWINBUF_OVERLAP or TWINBUF_BREAKDOWN turns overlap off.
  size_t depth;
  // How long a batch may hold the slot that the loader needs, from the first call of twinbuf_next that finds it
  // held. Then twinbuf_next returns TWINBUF_ERROR_HELD. Default: 10000.
  uint64_t held_timeout_ms;
} twinbuf_options;

// Memory of the caller for a text, and where a text is.
typedef struct {
  // The size of this struct in the program.
  size_t size;
  // May be NULL if `capacity` is 0.
  char *bytes;
  // The size of the memory, with room for a NUL.
  size_t capacity;
  // The length of the text, without the NUL.
  size_t len;
} twinbuf_text;

// A batch: the slot itself. `size` must be set before twinbuf_next. The caller may write to its bytes, until it
// releases it.
typedef struct {
  // The size of this struct in the program.
  size_t size;
  // The handle. Copies of this struct have the same.
  size_t id;
  // The bytes of the records, one after the other. They begin at a page.
  uint8_t *data;
  // The number of bytes.
  size_t len;
  // The number of records.
  uint64_t records;
  // The epoch, from 0.
  uint64_t epoch;
  // The step within the epoch, from 0.
  uint64_t step;
} twinbuf_batch;

// Why a call failed.
typedef struct {
  // The size of this struct in the library. A field is there if it ends within `size`.
  size_t size;
  // What the call returned: one of TWINBUF_ERROR_*.
  int32_t code;
  // One line; where they apply, with path, offset, the wanted and the found value.
  const char *message;
  // The file, or NULL.
  const char *path;
  // The place in the file in bytes, or -1.
  int64_t offset;
} twinbuf_error;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Opens files, and stores a handle in `*out`.
//
// A pointer that is NULL is TWINBUF_ERROR_NULL, a wrong `size` TWINBUF_ERROR_SIZE, a wrong `format`, `record_bytes` or
// `sequence` TWINBUF_ERROR_OPTION. No file at all, or one that is missing, not a regular file, too short or of another
// format, or that ends with a part of a record, is TWINBUF_ERROR_FILE. Any thread may call it.
int32_t twinbuf_open(const twinbuf_files *files,
                     twinbuf_records **out);

// Returns the version of the library: TWINBUF_VERSION of its own header.
uint32_t twinbuf_version(void);

// Stores what the records hold in `*out`: their number, size, element type and shape, and the length of the header.
//
// A pointer that is NULL is TWINBUF_ERROR_NULL, a freed handle TWINBUF_ERROR_HANDLE, a wrong `size`
// TWINBUF_ERROR_SIZE. Any thread may call it.
int32_t twinbuf_describe(const twinbuf_records *records,
                         twinbuf_description *out);

// Returns the number of records, or a TWINBUF_ERROR_* less than 0.
//
// NULL or a freed handle is an error. Any thread may call it.
int64_t twinbuf_count(const twinbuf_records *records);

// Makes a loader, starts its threads, and stores a handle in `*out`. The handle of the records may be freed
// afterwards.
//
// A pointer that is NULL is TWINBUF_ERROR_NULL, a freed handle TWINBUF_ERROR_HANDLE, a wrong `size`
// TWINBUF_ERROR_SIZE. Options that do not fit the records or the memory, and an option or a variable with a wrong
// value, are TWINBUF_ERROR_OPTION. Files that cannot be read, or not as `read_mode` asks, and a trace that cannot be
// written are TWINBUF_ERROR_FILE; a thread that cannot start is TWINBUF_ERROR_OTHER. Any thread may call it.
int32_t twinbuf_load(const twinbuf_records *records,
                     const twinbuf_options *options,
                     twinbuf_loader **out);

// Returns how many batches this rank has in an epoch that begins at its first step, or a TWINBUF_ERROR_* less than 0.
//
// NULL or a freed handle is an error. Any thread may call it at any time, also after close.
int64_t twinbuf_steps(const twinbuf_loader *loader,
                      uint64_t epoch);

// Begins with epoch `first`, and ends before epoch `end`: at once if that is not greater. With overlap, reading starts
// at once. What is left of epochs begun earlier is not delivered.
//
// NULL, after free: an error. After close, and during one: TWINBUF_ERROR_CLOSED. While another thread is inside
// another function of this loader: TWINBUF_ERROR_BUSY.
int32_t twinbuf_epochs(twinbuf_loader *loader,
                       uint64_t first,
                       uint64_t end);

// Begins where a checkpoint was taken, and ends before epoch `end`. The batch size and the number of ranks may be
// others. `from` is what twinbuf_checkpoint wrote: its `bytes` and `len`.
//
// NULL, after free, after close, two threads: as with twinbuf_epochs; a wrong `size`: TWINBUF_ERROR_SIZE. A text that
// is not a checkpoint is TWINBUF_ERROR_CHECKPOINT, also after close, and changes nothing. A checkpoint of other
// records or of another plan is TWINBUF_ERROR_CHECKPOINT too, unless the loader is closed. It ends the epochs begun
// earlier: twinbuf_next returns this error until new epochs begin.
int32_t twinbuf_resume(twinbuf_loader *loader,
                       const twinbuf_text *from,
                       uint64_t end);

// Writes the position after the last batch that was received, and a NUL: what twinbuf_resume reads. Stores its length,
// without the NUL.
//
// That of one rank serves all which stop after the same number of batches. With TWINBUF_LAST_KEEP a rank may have a
// step fewer than rank 0: at the end of an epoch, only rank 0's serves all.
//
// TWINBUF_SHORT if it does not fit: then nothing but the length is stored. Call it first with a `capacity` of 0 to
// learn the length. NULL, a wrong `size`, after free, after close, two threads: as with twinbuf_resume.
int32_t twinbuf_checkpoint(const twinbuf_loader *loader,
                           twinbuf_text *text);

// Waits for the next batch and stores it in `*batch`: TWINBUF_OK. TWINBUF_END if all batches of the epochs came; this
// repeats. TWINBUF_PENDING if none is ready within `wait_ms` milliseconds. With 0 it does not wait, with UINT64_MAX it
// waits without a limit. A read that the call does itself, of files in memory or with TWINBUF_OVERLAP=0, has no limit.
//
// An error of a read comes after all batches that precede it in the epochs, and then from each call until new epochs
// begin. So TWINBUF_END means that no batch is missing. TWINBUF_ERROR_HELD comes if a batch that was not released
// holds the slot that the loader needs: see `held_timeout_ms`. TWINBUF_ERROR_CANCELLED comes after twinbuf_cancel.
// These two end no epochs, and a later call goes on with the next batch. TWINBUF_ERROR_EPOCHS if no epochs were begun.
// `*batch` changes only if a batch was received. NULL, a wrong `size`, after free, after close, two threads: an error
// that ends no epochs.
int32_t twinbuf_next(twinbuf_loader *loader,
                     twinbuf_batch *batch,
                     uint64_t wait_ms);

// Ends the wait of the thread that is in twinbuf_next, within 20 ms, or that of the next call without another error:
// it returns TWINBUF_ERROR_CANCELLED, after the end and after new epochs too. No batch is lost, and a later call goes
// on. Several calls before that count as one. A read that the waiting thread does itself is not cut short.
//
// NULL, or after free: an error, so cancel before free. After close it does nothing. Any thread may call it at any
// time.
int32_t twinbuf_cancel(twinbuf_loader *loader);

// Takes a batch out of its slot, so that it may be kept for long: the loader gets other memory for the slot. The bytes
// stay where they are.
//
// A second time it does nothing. NULL, a wrong `size`, a batch that was released, or no memory: an error, and a batch
// stays as it was. After close and free of the loader it works as before. Any thread may call it.
int32_t twinbuf_keep(const twinbuf_batch *batch);

// Gives a batch back. Its bytes may not be used any more.
//
// NULL and a wrong `size` are errors. A batch that was already released is TWINBUF_ERROR_HANDLE, also if it was
// released through a copy of the struct. After close and free of the loader it works as before. Any thread may call
// it; of two that release the same batch, one gets the error.
int32_t twinbuf_release(const twinbuf_batch *batch);

// Writes a report of where the time went, as text, or as JSON if `json` is not 0, and a NUL. Stores its length.
//
// TWINBUF_SHORT, NULL, a wrong `size`, after free, after close, two threads: as with twinbuf_checkpoint.
int32_t twinbuf_report(const twinbuf_loader *loader,
                       int32_t json,
                       twinbuf_text *text);

// Ends the threads of a loader. Waits at most `wait_ms` milliseconds for a read in progress, or as long as it takes
// with UINT64_MAX; up to 1 s more for a thread that reads nothing, which only has to be woken. The handle stays valid
// until twinbuf_free; batches stay valid until they are released.
//
// TWINBUF_ERROR_TIMEOUT, with the file and the offset if they are known, if a read did not end: its thread is left
// behind with what it uses. TWINBUF_ERROR_READ if a batch that was not received could not be read; TWINBUF_ERROR_FILE
// if the trace could not be written. The loader is closed in each case. A second time: TWINBUF_ERROR_CLOSED. While
// another thread is inside another function of this loader: TWINBUF_ERROR_BUSY, and the loader is not closed:
// twinbuf_cancel first ends a wait there. NULL, after free: an error.
int32_t twinbuf_close(twinbuf_loader *loader,
                      uint64_t wait_ms);

// Ends the handle of records or of a loader. Loaders continue without the handle of their records. A loader that was
// not closed is closed: this waits at most 10 s for a read in progress. While another thread is inside a function of
// the loader, the loader ends when that thread leaves it.
//
// NULL is no error and does nothing. A handle that was already freed, or a batch's, is TWINBUF_ERROR_HANDLE. Of two
// threads that free the same handle, one gets the error.
int32_t twinbuf_free(void *handle);

// Returns the last error of this thread, or NULL if no call on this thread failed, and in destructors that run while the
// thread or the program ends. The result and its texts are valid until the next call that fails on this thread, or its
// end. A call that succeeds does not change it.
const twinbuf_error *twinbuf_last_error(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* TWINBUF_H */
