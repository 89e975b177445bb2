"""Common English words, of which `bench` makes its prompts."""

_TEXT = """
about above across act add afternoon again age air allow almost alone along always among animal answer apple area arm
around arrive art ask autumn away baby back bad bag ball bank base beach bear beautiful because bed before begin
behind believe bell below beside best better between big bird black blood blow blue board boat body bone book born
both bottle bottom box boy branch bread break breakfast bridge bright bring brother brown build burn bus busy butter
buy cake call camp candle captain car card care carry cat catch cause center chair chance change cheese child choose
church circle city clean clear climb clock close cloth cloud coast coat coffee cold color come common company cook
cool copper corn corner cost cotton count country course cousin cover cow cross crowd cry cup cut dance danger dark
daughter day deep deer desert desk dinner doctor dog door double down draw dream dress drink drive drop dry duck dust
each ear early earth east easy eat edge egg eight electric elephant empty end engine enough evening ever every example
eye face fact fall family famous far farm fast father feather feel field fight figure fill final find finger finish
fire first fish five flat floor flower fly follow food foot forest forget forward four fox free fresh friend front
fruit full garden gate gather gentle gift girl give glad glass gold good grass great green ground group grow guess
guitar hair half hall hand happy harbor hard hat hear heart heat heavy help hen hill history hold hole home honey hope
horse hospital hot hotel hour house hundred hungry hunt ice idea inside iron island join journey jump keep key kind
king kitchen knife know lady lake lamp land language large last late laugh law lead leaf learn leave left lemon letter
library lift light line lion list listen little live long look lost love low lucky lunch machine make many map market
master meal mean measure meat meet metal middle milk million mind minute mirror money month moon morning mother
mountain mouth move music name narrow near neck need nest never new night nine north nose note number ocean offer
office often oil old once onion open orange order other outside over own page paint pair paper parent park part party
pass past path pay peace pencil people pepper perhaps phone piano picture piece place plain plan plant plate play
please pocket point poor possible pound power present press pretty price prince promise proud pull push queen question
quick quiet quite rabbit race rain raise reach read ready reason red rest rice rich ride right ring rise river road
rock roll roof room root rose round rule run sad safe sail salt same sand save say school science sea season seat
second secret see seed seem sell send serve seven shade shape share sharp sheep shine ship shirt shoe shop short
shoulder show sick side silent silver simple sing sister sit six size skin sky sleep slow small smell smile smoke snow
soap soft soil soldier some song soon sound soup south space speak spell spend spoon spring square stand star start
station stay steam steel step stick still stone stop store storm story strange street strong student study sudden
sugar summer sun supper sure surprise sweet swim table tail take talk tall taste tea teach team tell ten thank thick
thin thing think thousand three throw ticket time tired today together tomorrow tool tooth touch tower town toy trade
train travel tree trip true trust try turn twelve twenty two uncle under until upon use valley village visit voice
wait walk wall want warm wash watch water wave way weak wear weather week well west wheat wheel while white whole wide
wild wind window wine wing winter wise wish without woman wonder wood wool word work world write yard year yellow
yesterday young
"""

WORDS = tuple(_TEXT.split())
