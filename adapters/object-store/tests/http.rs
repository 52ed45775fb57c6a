//! Plain HTTP servers: which answers are refused, what hangs, what error texts leave out.

use std::error::Error as _;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use twinbuf::{BoxError, Dataset, Loader, Plan, Records, Shuffle};
use twinbuf_object_store::{Error, Kind, Objects, Options};

/// Starts a server with objects of 800 bytes. Each answer has the lines `tags`.
fn serve(tags: &'static str) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            thread::spawn(move || answer(client, tags));
        }
    });
    Ok(address)
}

/// Answers one request: heads and ranges. `/refused` is answered by 401; `/hang`, and a list, never.
fn answer(mut client: TcpStream, tags: &str) -> io::Result<()> {
    let mut lines = BufReader::new(client.try_clone()?).lines().map_while(Result::ok);
    let request = lines.next().unwrap_or_default();
    let head: Vec<String> =
        lines.by_ref().take_while(|line| !line.is_empty()).map(|line| line.to_ascii_lowercase()).collect();
    if request.contains("/hang") || request.starts_with("PROPFIND") {
        // Until the client closes the connection.
        lines.for_each(drop);
        return Ok(());
    }
    if request.contains("/refused") {
        return client.write_all(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    }
    let range = head.iter().find_map(|line| line.strip_prefix("range: bytes=")?.split_once('-'));
    let range =
        range.and_then(|(start, end)| Some((start.parse().ok()?, end.parse::<usize>().ok()?.min(799))));
    let (start, end): (usize, usize) = range.unwrap_or((0, 799));
    let (status, len) = (if range.is_some() { "206 Part" } else { "200 Whole" }, end + 1 - start);
    write!(
        client,
        "HTTP/1.1 {status}\r\nContent-Length: {len}\r\nContent-Range: bytes {start}-{end}/800\r\n\
         {tags}Connection: close\r\n\r\n"
    )?;
    client.write_all(&vec![1; if request.starts_with("HEAD") { 0 } else { len }])
}

fn open(url: &str, names: &[&str]) -> Result<Objects, Error> {
    let options = Options {
        settings: vec![("allow_http".into(), "true".into())],
        names: names.iter().map(ToString::to_string).collect(),
        timeout: Duration::from_millis(500),
        ..Options::default()
    };
    Objects::open(url, options, |files| Records::open(files, 8))
}

/// Nothing would tell a replaced object from the one that was opened.
#[test]
fn objects_without_tag_and_time_are_refused() -> Result<(), BoxError> {
    let time = "Last-Modified: Tue, 14 Nov 2023 22:13:20 GMT\r\n";
    for tags in ["ETag: \"a\"\r\n", time, ""] {
        let url = format!("http://{}/x", serve(tags)?);
        match (tags, open(&url, &[])) {
            ("", Err(Error { url: found, range, kind: Kind::Untagged })) => {
                assert_eq!((found, range), (url, 0..800));
            }
            ("", found) => return Err(format!("{:?}", found.map(|objects| objects.len())).into()),
            (_, objects) => assert_eq!(objects?.len(), 100),
        }
    }
    Ok(())
}

/// The time limit of requests is also that of a head, of a list, and of a header.
#[test]
fn an_opening_that_hangs_ends() -> Result<(), BoxError> {
    let address = serve("ETag: \"a\"\r\n")?;
    for (path, names) in [("hang", &[][..]), ("", &["x", "hang"]), ("", &[])] {
        let error = open(&format!("http://{address}/{path}"), names).err().ok_or("opened")?;
        assert!(matches!(error.kind, Kind::Timeout(_)), "{path} {names:?}: {error}: {}", error.kind);
        let of = names.last().unwrap_or(&path);
        assert_eq!(error.url, format!("http://{address}/{of}"));
    }
    Ok(())
}

#[test]
fn passwords_and_signatures_are_in_no_text() -> Result<(), BoxError> {
    let address = serve("ETag: \"a\"\r\n")?;
    let objects = open(&format!("http://user:secret@{address}/x?sig=secret"), &[])?;
    assert_eq!(objects.name(), format!("1 objects of http://user@{address}/"));
    let urls = [
        format!("http://user:secret@{address}/refused?sig=secret"),
        format!("http://user:secret@{address}/hang?sig=secret"),
        // Not a URL: the slash ends what is then the port.
        format!("http://user:se/secret@{address}/x"),
        format!("gopher://user:secret@{address}/x?sig=secret"),
        format!("gopher://{address}/x#secret"),
        // No URLs.
        format!("{address}/x?sig=secret"),
        format!("no_scheme:secret://secret@{address}/x"),
        format!("http:// {address}/x?user=a&sig=secret#secret"),
        format!("http:// user:sec?secret@{address}/x?user=a@b&sig=secret"),
    ];
    for url in urls {
        let error = open(&url, &[]).err().ok_or("opened")?;
        let mut text = format!("{error} {error:?}");
        let mut source = error.source();
        while let Some(error) = source {
            text += &format!(" {error} {error:?}");
            source = error.source();
        }
        assert!(
            (text.contains(&address.to_string()) || url.contains("a@b")) && !text.contains("secret"),
            "{url}: {text}"
        );
    }
    Ok(())
}

/// Chunks of a window take about their own bytes, not the buffers of 8 KiB and more that they were received in.
#[test]
#[cfg(target_os = "linux")]
fn kept_chunks_take_their_bytes() -> Result<(), BoxError> {
    if std::env::var_os("ALONE").is_none() {
        // It measures the memory of the process, so no other test may run in that.
        let mut child = std::process::Command::new(std::env::current_exe()?);
        let child = child.args(["--exact", "kept_chunks_take_their_bytes"]).env("ALONE", "").output()?;
        assert!(child.status.success(), "{child:?}");
        return Ok(());
    }
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
        Ok::<u64, BoxError>(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
    };
    let options = Options {
        settings: vec![("allow_http".into(), "true".into())],
        names: (0..20).map(|name| name.to_string()).collect(),
        ..Options::default()
    };
    let url = format!("http://{}/", serve("ETag: \"a\"\r\n")?);
    let objects = Objects::open(&url, options, |files| Records::open(files, 8))?;
    let shuffle = Shuffle::Window { chunk_records: 1, window_chunks: 2000 };
    let plan = Plan::builder(2000).batch(100).shuffle(shuffle).build()?;
    let mut loader = Loader::builder(objects.clone(), plan).overlap(false).build()?;
    let mut epoch = loader.epoch(0);
    epoch.next().ok_or("no batch")??;
    let before = resident()?;
    for batch in epoch {
        batch?;
    }
    assert_eq!(objects.stats().requests, 2000);
    let more = resident()?.saturating_sub(before);
    assert!(more < 4 << 20, "{more} bytes for 16000");
    Ok(())
}
