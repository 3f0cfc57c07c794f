//! A QMux peer made with the crate `qmux`: a server with the contract of `levada interop qmux`, and a client that goes through it.
//!
//! usage: peer serve tcp|tls|ws|wss [CERT KEY]    prints "LISTENING <port>"; ends when its standard input does
//!        peer call tcp|tls|ws|wss PORT [CA]      prints a line of JSON with what it found

use std::fmt::Write as _;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use qmux::{Error, RecvStream, SendStream, Session, Version};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};
use web_transport_trait::{Error as _, RecvStream as _, SendStream as _, Session as _};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const NAME: &str = "interop";
const ALPN: &str = "qmux-02.interop";
const VERSIONS: &[Version] = &[Version::QMux02];
const PATIENCE: Duration = Duration::from_secs(30);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["serve", carrier] => serve(carrier, None).await,
        ["serve", carrier, cert, key] => serve(carrier, Some((cert, key))).await,
        ["call", carrier, port] => call(carrier, port.parse()?, None).await,
        ["call", carrier, port, ca] => call(carrier, port.parse()?, Some(ca)).await,
        _ => Err("peer serve CARRIER [CERT KEY] | peer call CARRIER PORT [CA]".into()),
    }
}

// ---------------------------------------------------------------- TLS

fn certificates(path: &str) -> Result<Vec<CertificateDer<'static>>> {
    Ok(CertificateDer::pem_file_iter(path)?.collect::<std::result::Result<_, _>>()?)
}

fn server_tls(cert: &str, key: &str, alpn: &[&str]) -> Result<Arc<rustls::ServerConfig>> {
    let key = PrivateKeyDer::from_pem_file(key)?;
    let mut config = rustls::ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(certificates(cert)?, key)?;
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    Ok(Arc::new(config))
}

fn client_tls(ca: &str) -> Result<Arc<rustls::ClientConfig>> {
    let mut roots = rustls::RootCertStore::empty();
    for certificate in certificates(ca)? {
        roots.add(certificate)?;
    }
    Ok(Arc::new(
        rustls::ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth(),
    ))
}

// ---------------------------------------------------------------- the server

async fn serve(carrier: &str, files: Option<(&str, &str)>) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("LISTENING {}", listener.local_addr()?.port());
    let alpn: &[&str] = if carrier == "tls" { &[ALPN, "qmux-02"] } else { &[] };
    let tls = files.map(|(cert, key)| server_tls(cert, key, alpn)).transpose()?;
    let carrier = carrier.to_string();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let (carrier, tls) = (carrier.clone(), tls.clone());
            tokio::spawn(async move {
                match accept(&carrier, socket, tls).await {
                    Ok(session) => contract(session).await,
                    Err(error) => eprintln!("no session: {error}"),
                }
            });
        }
    });
    let mut rest = Vec::new();
    tokio::io::stdin().read_to_end(&mut rest).await?;
    std::process::exit(0)
}

async fn accept(carrier: &str, socket: TcpStream, tls: Option<Arc<rustls::ServerConfig>>) -> Result<Session> {
    socket.set_nodelay(true)?;
    let ws = qmux::ws::Server::new().with_protocol(NAME, VERSIONS);
    Ok(match (carrier, tls) {
        ("tcp", _) => qmux::tcp::Config::new(Version::QMux02).accept(socket).await?,
        ("tls", Some(tls)) => qmux::tls::Server::new(tls).accept(socket).await?,
        ("ws", _) => ws.accept(socket).await?,
        ("wss", Some(tls)) => {
            ws.accept(tokio_rustls::TlsAcceptor::from(tls).accept(socket).await?)
                .await?
        }
        _ => return Err("no such carrier, or no certificate".into()),
    })
}

/// Keep the contract on one session, until it ends.
async fn contract(session: Session) {
    let (bidi, uni, datagrams) = (session.clone(), session.clone(), session.clone());
    tokio::spawn(async move {
        while let Ok((send, receive)) = bidi.accept_bi().await {
            let session = bidi.clone();
            tokio::spawn(async move { drop(answer(session, send, receive).await) });
        }
    });
    tokio::spawn(async move {
        while let Ok(receive) = uni.accept_uni().await {
            let session = uni.clone();
            tokio::spawn(async move {
                if let Ok(send) = session.open_uni().await {
                    drop(echo(send, receive, Bytes::new()).await);
                }
            });
        }
    });
    tokio::spawn(async move {
        while let Ok(data) = datagrams.recv_datagram().await {
            drop(datagrams.send_datagram(data));
        }
    });
    session.closed().await;
}

async fn echo(mut send: SendStream, mut receive: RecvStream, first: Bytes) -> Result<()> {
    let copied = async {
        send.write_all(&first).await?;
        while let Some(data) = receive.read_chunk(1 << 16).await? {
            send.write_all(&data).await?;
        }
        send.finish()
    };
    match copied.await {
        Ok(()) => {}
        Err(error @ Error::StreamReset(_)) => send.reset(error.stream_error().unwrap_or(0)),
        Err(error) => return Err(error.into()), // stopped: the crate has answered
    }
    drop(send.closed().await);
    Ok(())
}

async fn answer(session: Session, mut send: SendStream, mut receive: RecvStream) -> Result<()> {
    let mut head = BytesMut::new();
    let end = loop {
        match receive.read_chunk(1 << 16).await {
            Ok(Some(data)) => head.extend_from_slice(&data),
            Ok(None) if head.first() == Some(&b'!') => return refuse(send).await,
            Ok(None) => {
                send.finish()?;
                return Ok(());
            }
            Err(error) => {
                send.reset(error.stream_error().unwrap_or(0));
                return Ok(());
            }
        }
        if head.first().is_some_and(|&first| first != b'!') {
            return echo(send, receive, head.freeze()).await;
        }
        if let Some(end) = head.iter().position(|&octet| octet == b'\n') {
            break end;
        }
        if head.len() > 200 {
            return refuse(send).await;
        }
    };
    let line = String::from_utf8_lossy(&head.split_to(end + 1)[1..end]).into_owned();
    let mut words = line.splitn(3, ' ');
    let (name, one, two) = (words.next(), words.next(), words.next());
    let number = one.and_then(|word| word.parse::<u32>().ok());
    match (name, number, one, two) {
        (Some("close"), Some(code), _, text) => session.close(code, text.unwrap_or("")),
        // The crate cuts a transport only with the process.
        (Some("drop"), None, None, None) => std::process::exit(0),
        (Some("reset"), Some(code), _, None) => {
            send.reset(code);
            while receive.read_chunk(1 << 16).await?.is_some() {}
        }
        (Some("stop"), Some(code), _, None) => {
            receive.stop(code);
            send.finish()?;
        }
        (Some("hold"), Some(milliseconds), _, None) => {
            tokio::time::sleep(Duration::from_millis(milliseconds.into())).await;
            let mut count = head.len();
            while let Some(data) = receive.read_chunk(1 << 16).await? {
                count += data.len();
            }
            send.write_all(count.to_string().as_bytes()).await?;
            send.finish()?;
            drop(send.closed().await);
        }
        (Some("send"), Some(count), _, None) => {
            send.write_all(&pattern(count as usize)).await?;
            send.finish()?;
            drop(send.closed().await);
        }
        (Some("open"), None, Some(kind @ ("uni" | "bidi")), Some(count)) => {
            for at in 0..count.parse::<u32>()? {
                let mut opened = if kind == "uni" {
                    session.open_uni().await?
                } else {
                    session.open_bi().await?.0
                };
                opened.write_all(at.to_string().as_bytes()).await?;
                opened.finish()?;
            }
            send.write_all(b"done").await?;
            send.finish()?;
            drop(send.closed().await);
        }
        _ => return refuse(send).await,
    }
    Ok(())
}

async fn refuse(mut send: SendStream) -> Result<()> {
    send.reset(1);
    Ok(())
}

fn pattern(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at % 251) as u8).collect()
}

// ---------------------------------------------------------------- the client

async fn dial(carrier: &str, port: u16, ca: Option<&str>) -> Result<Session> {
    let tls = ca.map(client_tls).transpose()?;
    let ws = qmux::ws::Client::new().with_protocol(NAME, VERSIONS);
    Ok(match (carrier, tls) {
        ("tcp", _) => {
            qmux::tcp::Config::new(Version::QMux02)
                .connect(("127.0.0.1", port))
                .await?
        }
        ("tls", Some(tls)) => {
            let client = qmux::tls::Client::new(tls)
                .with_protocol(NAME, VERSIONS)
                .require_protocol();
            client.connect(("127.0.0.1", port), "localhost").await?
        }
        ("ws", _) => ws.connect(&format!("ws://127.0.0.1:{port}/qmux")).await?,
        ("wss", Some(tls)) => {
            let connector = tokio_tungstenite::Connector::Rustls(tls);
            ws.with_connector(connector)
                .connect(&format!("wss://localhost:{port}/qmux"))
                .await?
        }
        _ => return Err("no such carrier, or no authority".into()),
    })
}

async fn in_time<T>(what: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(PATIENCE, what)
        .await
        .map_err(|_| "no answer in time")?
}

/// Send octets on a new stream, with the end, and read the answer.
async fn exchange(session: Session, data: Vec<u8>) -> Result<Bytes> {
    let (mut send, mut receive) = session.open_bi().await?;
    let sending = async {
        send.write_all(&data).await?;
        send.finish()
    };
    let (sent, got) = tokio::join!(sending, receive.read_all());
    sent?;
    Ok(got?)
}

/// Give a command, and return the code that the server's direction is reset with.
async fn reset_of(session: &Session, command: &str) -> Result<u32> {
    let (mut send, mut receive) = session.open_bi().await?;
    send.write_all(command.as_bytes()).await?;
    let code = match receive.read_all().await {
        Ok(_) => return Err("no reset".into()),
        Err(error) => error.stream_error().ok_or("no code")?,
    };
    send.finish()?;
    Ok(code)
}

async fn call(carrier: &str, port: u16, ca: Option<&str>) -> Result<()> {
    let mut found = String::new();
    let mut tell = |name: &str, value: String| {
        let comma = if found.is_empty() { "{" } else { ", " };
        write!(found, "{comma}\"{name}\": {value}").expect("a string takes it");
    };
    let session = in_time(dial(carrier, port, ca)).await?;

    let mut sizes = Vec::new();
    for size in [0, 1, 16_382, 1_000_000] {
        let got = in_time(exchange(session.clone(), vec![b'x'; size])).await?;
        sizes.push(if got.iter().all(|&octet| octet == b'x') {
            got.len()
        } else {
            usize::MAX
        });
    }
    tell("echo", format!("{sizes:?}"));

    let mut running = tokio::task::JoinSet::new();
    for at in 0..300 {
        running.spawn(in_time(exchange(session.clone(), format!("stream {at}").into_bytes())));
    }
    let mut same = 0;
    while let Some(got) = running.join_next().await {
        same += usize::from(got??.starts_with(b"stream "));
    }
    tell("many", same.to_string());

    let mut send = in_time(async { Ok(session.open_uni().await?) }).await?;
    send.write_all(b"one way").await?;
    send.finish()?;
    let mut receive = in_time(async { Ok(session.accept_uni().await?) }).await?;
    tell(
        "uni",
        format!("{:?}", String::from_utf8_lossy(&receive.read_all().await?)),
    );

    let mut count = 0;
    for at in 0..10 {
        // One at a time: the npm package drops datagrams while others wait to be sent.
        session.send_datagram(Bytes::from(format!("datagram {at}")))?;
        let got = in_time(async { Ok(session.recv_datagram().await?) }).await?;
        count += usize::from(got == format!("datagram {at}"));
    }
    tell("datagrams", count.to_string());

    let (mut send, mut receive) = session.open_bi().await?;
    send.write_all(b"some").await?;
    receive.read_chunk(4).await?;
    send.reset(77);
    let code = in_time(async { Ok(receive.read_all().await.err().and_then(|error| error.stream_error())) }).await?;
    tell("reset", code.ok_or("no code")?.to_string());

    tell(
        "command_reset",
        in_time(reset_of(&session, "!reset 9\n")).await?.to_string(),
    );
    tell(
        "command_unknown",
        in_time(reset_of(&session, "!what\n")).await?.to_string(),
    );

    let (mut send, mut receive) = session.open_bi().await?;
    send.write_all(b"!stop 11\n").await?;
    in_time(async { Ok(receive.read_all().await?) }).await?;
    let stopped = in_time(async {
        loop {
            if let Err(error) = send.write_all(b"more").await {
                return Ok(error.stream_error());
            }
            tokio::task::yield_now().await;
        }
    });
    tell("command_stop", stopped.await?.ok_or("no code")?.to_string());

    let mut data = b"!hold 20\n".to_vec();
    data.resize(data.len() + 300_000, 0);
    let held = in_time(exchange(session.clone(), data)).await?;
    tell("command_hold", String::from_utf8_lossy(&held).into_owned());
    let sent = in_time(exchange(session.clone(), b"!send 100000\n".to_vec())).await?;
    tell("command_send", (sent == pattern(100_000)).to_string());

    for kind in ["uni", "bidi"] {
        let command = format!("!open {kind} 150\n").into_bytes();
        let asked = tokio::spawn(in_time(exchange(session.clone(), command)));
        let mut sum = 0;
        for _ in 0..150 {
            let got = in_time(async {
                let mut receive = if kind == "uni" {
                    session.accept_uni().await?
                } else {
                    session.accept_bi().await?.1
                };
                Ok(receive.read_all().await?)
            });
            sum += String::from_utf8_lossy(&got.await?).parse::<u32>()?;
        }
        let done = asked.await?? == "done";
        tell(
            &format!("command_open_{kind}"),
            if done { sum.to_string() } else { "null".into() },
        );
    }

    let _asked = tokio::spawn(exchange(session.clone(), b"!close 42 so long\n".to_vec()));
    let end = in_time(async { Ok(session.closed().await) }).await?;
    tell(
        "command_close",
        format!("{:?}", end.session_error().ok_or("no code")?)
            .replace('(', "[")
            .replace(')', "]"),
    );

    let other = in_time(dial(carrier, port, ca)).await?;
    let _asked = tokio::spawn(exchange(other.clone(), b"!drop\n".to_vec()));
    let end = in_time(async { Ok(other.closed().await) }).await?;
    tell(
        "command_drop",
        end.session_error()
            .map_or("\"lost\"".to_string(), |(code, _)| code.to_string()),
    );

    println!("{found}}}");
    Ok(())
}
