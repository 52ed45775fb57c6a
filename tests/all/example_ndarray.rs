//! The example `ndarray`, whose assertions are about places, shapes, values and types.

#[path = "../../examples/ndarray.rs"]
mod example;

#[test]
fn views_are_in_place_and_of_the_records_shape() {
    example::main().unwrap();
}
