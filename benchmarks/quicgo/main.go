// One end of quic-go for the rows of `levada bench carriers` about paths that lose and reorder packets.
//
// `quicgo serve FOLDER` prints its port, reads whole streams and answers each with one byte.
// `quicgo call PORT BYTES` sends one stream for each line that it reads, and prints the seconds until the answer.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/quic-go/quic-go"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	if len(arguments) == 2 && arguments[0] == "serve" {
		return serve(arguments[1])
	}
	if len(arguments) == 3 && arguments[0] == "call" {
		size, err := strconv.Atoi(arguments[2])
		if err != nil {
			return err
		}
		return call(arguments[1], size)
	}
	return fmt.Errorf("wanted: serve FOLDER, or call PORT BYTES")
}

func serve(folder string) error {
	certificate, err := tls.LoadX509KeyPair(filepath.Join(folder, "certificate.pem"), filepath.Join(folder, "key.pem"))
	if err != nil {
		return err
	}
	settings := &tls.Config{Certificates: []tls.Certificate{certificate}, NextProtos: []string{"bench"}}
	listener, err := quic.ListenAddr("127.0.0.1:0", settings, nil)
	if err != nil {
		return err
	}
	fmt.Println(listener.Addr().(*net.UDPAddr).Port)
	for {
		connection, err := listener.Accept(context.Background())
		if err != nil {
			return err
		}
		go func() {
			for {
				stream, err := connection.AcceptStream(context.Background())
				if err != nil {
					return
				}
				if _, err := io.Copy(io.Discard, stream); err != nil {
					return
				}
				stream.Write([]byte("k"))
				stream.Close()
			}
		}()
	}
}

func call(port string, size int) error {
	settings := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"bench"}}
	connection, err := quic.DialAddr(context.Background(), "127.0.0.1:"+port, settings, nil)
	if err != nil {
		return err
	}
	data := make([]byte, size)
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		start := time.Now()
		stream, err := connection.OpenStreamSync(context.Background())
		if err != nil {
			return err
		}
		if _, err := stream.Write(data); err != nil {
			return err
		}
		if err := stream.Close(); err != nil {
			return err
		}
		if _, err := io.ReadAll(stream); err != nil {
			return err
		}
		fmt.Println(time.Since(start).Seconds())
	}
	return connection.CloseWithError(0, "")
}
