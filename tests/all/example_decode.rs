//! The example `decode`: pictures of any length, the same whoever decodes them.

#[test]
fn the_pictures_are_the_same_with_any_number_of_threads() {
    let folder = crate::common::folder();
    let run = |variables: &[(&str, &str)]| {
        let mut command = crate::common::example("decode");
        let output = command.arg(folder.path()).envs(variables.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("2 epochs, 10 batches"), "{text}");
        text.lines().take(2).map(str::to_string).collect::<Vec<_>>()
    };
    let two = run(&[]);
    assert!(two[0].starts_with("160 pictures of ") && two[1].parse::<u64>().unwrap() > 0, "{two:?}");
    assert_eq!(run(&[("TWINBUF_OVERLAP", "0")]), two);
    assert_eq!(run(&[("TWINBUF_WORKERS", "1")]), two);
}
