// Golumber is go-lumber at the other end of the tests: `golumber send ADDRESS COUNT LEVEL` sends windows of 100 events in version 2;
// `golumber receive VERSION` prints its address, then each event that it gets as a line of JSON.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"net"
	"os"
	"strconv"

	client "github.com/elastic/go-lumber/client/v2"
	"github.com/elastic/go-lumber/server"
)

const window = 100

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func send(address string, count int, level int) {
	sender := must(client.SyncDial(address, client.CompressionLevel(level)))
	defer sender.Close()
	var events []interface{}
	for i := 0; i < count; i++ {
		host := map[string]interface{}{"name": "web-01"}
		events = append(events, map[string]interface{}{"message": fmt.Sprintf("line %d é", i), "offset": i, "host": host})
		if len(events) == window || i == count-1 {
			if acked := must(sender.Send(events)); acked != len(events) {
				log.Fatalf("%d of %d events acked", acked, len(events))
			}
			events = events[:0]
		}
	}
}

func receive(version string) {
	listener := must(net.Listen("tcp", "127.0.0.1:0"))
	receiver := must(server.NewWithListener(listener, server.V1(version == "1"), server.V2(version == "2")))
	fmt.Println(listener.Addr())
	for batch := range receiver.ReceiveChan() {
		for _, event := range batch.Events {
			fmt.Println(string(must(json.Marshal(event))))
		}
		batch.ACK()
	}
}

func main() {
	if os.Args[1] == "send" {
		send(os.Args[2], must(strconv.Atoi(os.Args[3])), must(strconv.Atoi(os.Args[4])))
	} else {
		receive(os.Args[2])
	}
}
