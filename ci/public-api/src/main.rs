//! Prints each public item of a crate, one a line, from the JSON that rustdoc wrote: `twinbuf-public-api FILE`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file =
        std::env::args_os().nth(1).ok_or("wanted the file that `rustdoc --output-format json` wrote")?;
    let api = public_api::Builder::from_rustdoc_json(file)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .omit_auto_derived_impls(true)
        .build()?;
    print!("{api}");
    Ok(())
}
