//! The loader for Zig: owners, and an iterator over batches. `c` is what `zig translate-c` makes of twinbuf.h, which
//! documents the calls. A call that fails returns `error.Twinbuf`, but for `deinit`, and `lastError` has its text.
const std = @import("std");
pub const c = @import("c");
pub const Error = error{Twinbuf};
fn check(code: i32) Error!i32 {
    return if (code >= 0) code else error.Twinbuf;
}

/// Why the last call of this thread that failed did: code, message, path and offset.
pub fn lastError() ?*const c.twinbuf_error {
    return c.twinbuf_last_error();
}

/// A struct of twinbuf.h with its size set, and 0 in all other fields.
pub fn make(comptime Struct: type) Struct {
    var made = std.mem.zeroes(Struct);
    made.size = @sizeOf(Struct);
    return made;
}

pub const Records = struct {
    handle: ?*c.twinbuf_records,

    /// The paths replace those of `files`.
    pub fn init(paths: []const [*:0]const u8, files: c.twinbuf_files) Error!Records {
        var all = files;
        all.paths = @ptrCast(paths.ptr);
        all.count = paths.len;
        var records = Records{ .handle = null };
        _ = try check(c.twinbuf_open(&all, &records.handle));
        return records;
    }
    pub fn deinit(self: Records) void {
        _ = c.twinbuf_free(self.handle);
    }
    pub fn describe(self: Records) Error!c.twinbuf_description {
        var found = make(c.twinbuf_description);
        _ = try check(c.twinbuf_describe(self.handle, &found));
        return found;
    }
};

pub const Loader = struct {
    handle: ?*c.twinbuf_loader,
    batch: c.twinbuf_batch = make(c.twinbuf_batch),

    pub fn init(records: Records, options: c.twinbuf_options) Error!Loader {
        var loader = Loader{ .handle = null };
        _ = try check(c.twinbuf_load(records.handle, &options, &loader.handle));
        return loader;
    }
    pub fn deinit(self: *Loader) void {
        self.release();
        _ = c.twinbuf_free(self.handle);
    }
    pub fn epochs(self: *Loader, first: u64, end: u64) Error!void {
        _ = try check(c.twinbuf_epochs(self.handle, first, end));
    }
    pub fn resumeFrom(self: *Loader, text: *const c.twinbuf_text, end: u64) Error!void {
        _ = try check(c.twinbuf_resume(self.handle, text, end));
    }
    pub fn checkpoint(self: *Loader, text: *c.twinbuf_text) (Error || error{Short})!void {
        if (try check(c.twinbuf_checkpoint(self.handle, text)) == c.TWINBUF_SHORT) return error.Short;
    }
    /// The next batch, or null at the end. The one before is released.
    pub fn next(self: *Loader) Error!?[]u8 {
        self.release();
        if (try check(c.twinbuf_next(self.handle, &self.batch, std.math.maxInt(u64))) == c.TWINBUF_END) return null;
        return self.batch.data[0..self.batch.len];
    }
    fn release(self: *Loader) void {
        if (self.batch.id != 0) _ = c.twinbuf_release(&self.batch);
        self.batch = make(c.twinbuf_batch);
    }
    pub fn close(self: *Loader) Error!void {
        self.release();
        _ = try check(c.twinbuf_close(self.handle, std.math.maxInt(u64)));
    }
};
