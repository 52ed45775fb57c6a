// Trains a small model on the batches of one of two ranks for three epochs, resumed once. One slot is read while the
// other is used in place: trainer FILE RANK
const std = @import("std");
const twinbuf = @import("twinbuf");
const c = twinbuf.c;

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

pub fn main(init: std.process.Init) !void {
    train(init) catch |err| {
        if (twinbuf.lastError()) |last| std.debug.print("trainer: {s}\n", .{last.message});
        return err;
    };
}

fn train(init: std.process.Init) !void {
    const arguments = try init.minimal.args.toSlice(init.arena.allocator());
    if (arguments.len != 3) return error.Usage;
    var files = twinbuf.make(c.twinbuf_files);
    files.record_bytes = numbers * 4;
    const records = try twinbuf.Records.init(&.{arguments[1]}, files);
    defer records.deinit();
    var options = twinbuf.make(c.twinbuf_options);
    options.batch = 4;
    options.shuffle = 1;
    options.seed = 42;
    options.world = 2;
    options.depth = 2;
    options.rank = try std.fmt.parseInt(u64, arguments[2], 10);

    var model = Model{};
    var sum = std.hash.Adler32{};
    var batches: u64 = 0;
    var bytes: [4096]u8 = undefined;
    var checkpoint = twinbuf.make(c.twinbuf_text);
    checkpoint.bytes = &bytes;
    checkpoint.capacity = bytes.len;
    for ([_]u64{ 40000, std.math.maxInt(u64) }) |most| { // as a training that was stopped and resumed
        var loader = try twinbuf.Loader.init(records, options);
        defer loader.deinit();
        if (checkpoint.len == 0) try loader.epochs(0, 3) else try loader.resumeFrom(&checkpoint, 3);
        var taken: u64 = 0;
        while (taken < most) : (taken += 1) {
            const batch = try loader.next() orelse break;
            sum.update(batch);
            model.step(@alignCast(std.mem.bytesAsSlice(f32, batch)));
        }
        batches += taken;
        try loader.checkpoint(&checkpoint);
        try loader.close();
    }
    var buffer: [256]u8 = undefined;
    var out = std.Io.File.stdout().writerStreaming(init.io, &buffer);
    try out.interface.print("rank {d}: {d} batches, adler32 {x:0>8}\n", .{ options.rank, batches, sum.adler });
    try out.interface.print("loss {x:0>8} = {d:.6}\n", .{ @as(u32, @bitCast(model.loss)), model.loss });
    try out.interface.flush();
}
