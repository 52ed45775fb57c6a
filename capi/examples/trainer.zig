// Trains a small model on the batches of one of two ranks for three epochs, resumed once. One slot is read while the
// other is used in place: trainer FILE RANK
const std = @import("std");
const c = @import("twinbuf"); // what `zig translate-c` makes of twinbuf.h

const numbers = 16; // fifteen inputs and a target

const Model = struct {
    weights: [numbers - 1]f32 = @splat(0),
    bias: f32 = 0,
    loss: f32 = 1, // a moving average

    fn step(self: *Model, batch: []f32) void {
        for (batch) |*number| number.* = (number.* - 0.5) * 3.4641016;
        var at: usize = 0;
        while (at < batch.len) : (at += numbers) {
            const inputs = batch[at..][0 .. numbers - 1];
            const target = batch[at + numbers - 1];
            var output = self.bias;
            for (self.weights, inputs) |weight, input| output += weight * input;
            const err = output - target;
            for (&self.weights, inputs) |*weight, input| weight.* -= 0.001 * err * input;
            self.bias -= 0.001 * err;
            self.loss += 0.001 * (err * err - self.loss);
        }
    }
};

fn check(code: i32) !i32 {
    if (code >= 0) return code;
    std.debug.print("trainer: {s}\n", .{c.twinbuf_last_error().*.message});
    return error.Twinbuf;
}

pub fn main(init: std.process.Init) !void {
    const arguments = try init.minimal.args.toSlice(init.arena.allocator());
    if (arguments.len != 3) return error.Usage;
    const paths = [_][*:0]const u8{arguments[1]};
    const files = c.twinbuf_files{ .paths = @ptrCast(&paths), .count = 1, .record_bytes = numbers * 4 };
    var records: ?*c.twinbuf_records = null;
    _ = try check(c.twinbuf_open(&files, &records));
    defer _ = c.twinbuf_free(records);
    var options = c.twinbuf_options{ .batch = 4, .shuffle = true, .seed = 42, .world = 2, .depth = 2 };
    options.rank = try std.fmt.parseInt(u64, arguments[2], 10);

    var model = Model{};
    var sum = std.hash.Adler32{};
    var batches: u64 = 0;
    var bytes: [4096]u8 = undefined;
    var checkpoint = c.twinbuf_text{ .bytes = &bytes, .capacity = bytes.len };
    const forever = std.math.maxInt(u64);
    for ([_]u64{ 40000, forever }) |most| { // as a training that was stopped and resumed
        var loader: ?*c.twinbuf_loader = null;
        _ = try check(c.twinbuf_load(records, &options, &loader));
        defer _ = c.twinbuf_free(loader);
        const resumed = checkpoint.len > 0;
        _ = try check(if (resumed) c.twinbuf_resume(loader, &checkpoint, 3) else c.twinbuf_epochs(loader, 0, 3));
        var batch: c.twinbuf_batch = undefined;
        var taken: u64 = 0;
        while (taken < most and try check(c.twinbuf_next(loader, &batch, forever)) == c.TWINBUF_OK) : (taken += 1) {
            sum.update(batch.data[0..batch.len]);
            model.step(@alignCast(std.mem.bytesAsSlice(f32, batch.data[0..batch.len])));
            _ = try check(c.twinbuf_release(&batch));
        }
        batches += taken;
        if (try check(c.twinbuf_checkpoint(loader, &checkpoint)) != c.TWINBUF_OK) return error.Short;
        _ = try check(c.twinbuf_close(loader, forever));
    }
    var buffer: [256]u8 = undefined;
    var out = std.Io.File.stdout().writerStreaming(init.io, &buffer);
    try out.interface.print("rank {d}: {d} batches, adler32 {x:0>8}\n", .{ options.rank, batches, sum.adler });
    try out.interface.print("loss {x:0>8} = {d:.6}\n", .{ @as(u32, @bitCast(model.loss)), model.loss });
    try out.interface.flush();
}
